"""Orders for engines, deaths and the supervisor's looks in every sequence.

No engine has two processes, none that was ordered away is taken for dead or started again, an order that is done has
come to pass, and the supervisor does not give up the last engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.core.errors import ConfigError, JobError
from megarl.explore.store import EngineStatus, RegisteredEngine, Store
from megarl.run.nodes.node import NotStarted, Spec, Started
from megarl.run.supervise import orders, replace
from tests.conftest import examples

SERVING, ASLEEP, ABSENT = EngineStatus.SERVING, EngineStatus.ASLEEP, EngineStatus.ABSENT
ENGINES = (0, 1)
ACTIONS = st.one_of(
    st.tuples(st.just("order"), st.sampled_from(ENGINES), st.sampled_from([SERVING, ASLEEP, ABSENT])),
    st.tuples(st.just("die"), st.sampled_from(ENGINES), st.none()),
    st.tuples(st.sampled_from(["look", "supervise"]), st.none(), st.none()),
    st.tuples(st.just("scale"), st.integers(1, 4), st.sampled_from([None, 1, 2])),
    st.tuples(st.just("step"), st.none(), st.none()),
    st.tuples(st.just("break"), st.integers(0, 2), st.none()),
)


class Process:
    def __init__(self, name: str) -> None:
        self.name, self.log = name, Path(name)
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def tail(self) -> str:
        return ""

    def last_output_at(self) -> float:
        return 0.0


class Machine:
    """A node whose processes are numbers."""

    rank, name = 0, ""

    def __init__(self) -> None:
        machines.append(self)
        self.processes: dict[str, Process] = {}
        self.specs: dict[str, Spec] = {}
        """Of the last start of each."""
        self.broken: set[str] = set()
        """Processes that end by themselves at their next start."""
        self.starting: set[str] = set()
        """Processes that do not listen yet."""

    def living(self) -> list[str]:
        return [name for name in self.processes if self.lives(name)]

    def start(self, spec: Spec) -> Process:
        assert not self.lives(spec.name), f"{spec.name} is started twice"
        assert not {gpu for name in self.living() for gpu in self.specs[name].gpus} & {*spec.gpus}, "two have a GPU"
        self.processes[spec.name], self.specs[spec.name] = Process(spec.name), spec
        if spec.name in self.broken:
            self.broken.discard(spec.name)
            self.processes[spec.name].status = 1
        return self.processes[spec.name]

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        for name in names:
            if name in self.processes:
                self.processes[name].status = -15

    def lives(self, name: str) -> bool:
        return name in self.processes and self.processes[name].status is None

    def listens(self, name: str) -> bool:
        return self.lives(name) and name not in self.starting

    def fault(self) -> None:
        return None

    def note(self, name: str) -> None:
        """As a node does once a server listens."""

    def place(self, number: int, workers: int) -> Started:
        """As ``MoreEngines``; there is room for three, each with GPUs of its own."""
        if number > 2 or workers > 2:
            raise ConfigError("no room")
        name, gpus = f"engine {number}", tuple(range(number * workers, (number + 1) * workers))
        spec = Spec(name, ("w",) * workers, {}, name, listens=f"h:{number}", gpus=gpus)
        return Started(NotStarted(name, Path(name)), self, spec)  # type: ignore[arg-type]


machines: list[Machine] = []
"""The last one is that of the test under way."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('orders')}/store.db"


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "LOOK_S", 3600.0)  # the test looks itself
        patch.setattr(replace, "SETTLE_S", 0.0)
        patch.setattr(replace, "LOOK_S", 0.0)
        patch.setattr(replace, "_listens", lambda address: machines[-1].listens(f"engine {address[2:]}"))
        yield


LOOK_AND_SUPERVISE = [("look", None, None), ("supervise", None, None)]
NARROWED = [("scale", 1, 2), *LOOK_AND_SUPERVISE, ("scale", 2, 1)]
"""An engine that ended comes back to the GPUs that a wider one has meanwhile."""
LAST_OF_TWO = [
    ("scale", 2, 2),
    *LOOK_AND_SUPERVISE * 3,
    ("break", 0, None),
    ("die", 0, None),
    ("supervise", None, None),
    ("supervise", None, None),
    ("scale", 1, None),
]
"""Engine 0 is given up while it is the only one that is wanted."""
SECOND_DOES_NOT_WIDEN = [("scale", 2, 2), ("break", 1, None)]
"""An engine cannot go back to its GPU, which the other one has."""
ENDED_AS_IT_FAILS = [("scale", 3, None), ("look", None, None), ("break", 2, None), ("supervise", None, None)]
ENDED_AS_IT_FAILS += [("scale", 1, None)]
"""An engine is ordered away as it is found not to start."""
NARROWED_WITHOUT_ONE = [
    ("scale", 2, 2),
    ("look", None, None),
    ("order", 0, ABSENT),
    ("supervise", None, None),
    ("scale", 1, 1),
]


@settings(max_examples=examples(40, 400), deadline=None)
@example(later=False, actions=NARROWED)
@example(later=False, actions=NARROWED_WITHOUT_ONE)
@example(later=False, actions=LAST_OF_TWO)
@example(later=False, actions=SECOND_DOES_NOT_WIDEN)
@example(later=False, actions=ENDED_AS_IT_FAILS)
@given(later=st.booleans(), actions=st.lists(ACTIONS, max_size=25))
def test_every_sequence(url: str, later: bool, actions: list[Any]) -> None:
    machine, store = Machine(), Store(url)
    names = [f"engine {number}" for number in range(4)]
    specs = [Spec(name, ("w",), {}, name, listens=f"h:{n}", gpus=(n,)) for n, name in enumerate(names[: len(ENGINES)])]
    started = [Started(NotStarted(s.name, Path(s.log)) if later else machine.start(s), machine, s) for s in specs]  # type: ignore[arg-type]
    wanted, state = (ABSENT, ABSENT) if later else (SERVING, EngineStatus.STARTING)
    store.engines.register([RegisteredEngine(n, f"http://{n}", 1, wanted, state) for n in ENGINES])
    replacements = replace.Replacements(started, left=1000)
    supervisor = orders.EngineOrders(Store(url), replacements, 0.0, 1, machine)

    known: dict[int, EngineStatus] = {}

    def look() -> None:
        wanted_before = any(engine.wanted is not ABSENT for engine in store.engines.own())
        supervisor.look()
        assert any(engine.wanted is not ABSENT for engine in store.engines.own()) is wanted_before
        for engine in store.engines.own():
            known[engine.number] = engine.wanted
            if engine.done == engine.orders > 0 and engine.wanted is ABSENT:
                assert engine.state is ABSENT and not machine.lives(names[engine.number])

    def supervise() -> bool:
        """Return False where the attempt fails."""
        left = [names[n] for n, wanted in known.items() if wanted is not SERVING and not machine.lives(names[n])]
        try:
            supervisor.carry_out()
        except JobError:
            assert broken
            return False
        goes_on = replacements.replace_dead()
        assert goes_on or broken
        assert not any(machine.lives(name) for name in left), "started again though it is not wanted"
        return goes_on

    broken = any(action == "break" for action, _, _ in actions)
    scaled = any(action == "scale" and workers for action, _, workers in actions)
    for action, number, asked in actions:
        if scaled and asked is ASLEEP:
            continue  # engines that take turns with the trainer are not scaled
        if action == "order":
            store.engines.order(number, asked)
        elif action == "die" and machine.lives(names[number]):
            machine.processes[names[number]].status = -9
        elif action == "scale":
            before = sum(engine.wanted is not ABSENT for engine in store.engines.own())
            assert store.engines.scale("train", number, asked)[0] == before
            assert sum(engine.wanted is not ABSENT for engine in store.engines.own()) == number
        elif action == "step":
            store.journal.record_step(store.journal.last_step() + 1, {})
        elif action == "look":
            look()
        elif action == "break":
            machine.broken.add(names[number])
        elif action == "supervise" and not supervise():
            return
    for _ in range(10):
        look()
        if not supervise():
            return
    look()
    for engine in store.engines.own():
        assert engine.done == engine.orders
        if engine.number > 2:
            assert engine.wanted is ABSENT, "there is no room for it"
        elif engine.number not in ENGINES and machine.lives(names[engine.number]):
            assert engine.url == f"http://h:{engine.number}"
        if engine.wanted is not ASLEEP:
            assert machine.lives(names[engine.number]) is (engine.wanted is SERVING)
        if engine.wanted is SERVING and machine.lives(names[engine.number]):
            assert len(machine.specs[names[engine.number]].argv) == engine.workers
    supervisor.close()
    store.close()


def added(machine: Machine, store: Store, url: str) -> tuple[orders.EngineOrders, replace.Replacements]:
    """Supervisor of a job with engine 0, to which engine 1 has been added."""
    spec = Spec("engine 0", ("w",), {}, "engine 0", listens="h:0", gpus=(0,))
    store.engines.register([RegisteredEngine(0, "http://0", 1)])
    replacements = replace.Replacements([Started(machine.start(spec), machine, spec)], 1)  # type: ignore[arg-type]
    supervisor = orders.EngineOrders(Store(url), replacements, 0.0, 1, machine)
    assert store.engines.scale("train", 2) == (1, 1)
    supervisor.look()
    supervisor.carry_out()
    assert machine.lives("engine 1")
    return supervisor, replacements


def test_an_added_engine_that_does_not_start_is_given_up(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It ended by itself, which ends the attempt where the job began with the engine."""
    machine, store = Machine(), Store(url)
    supervisor, replacements = added(machine, store, url)
    machine.processes["engine 1"].status = 1
    assert replacements.replace_dead()
    for _ in range(3):
        supervisor.carry_out()
        supervisor.look()
    first, second = store.engines.own()
    assert (first.wanted, second.wanted, second.state) == (SERVING, ABSENT, ABSENT)
    assert "engine 1 is not added: it ended before it served" in caplog.text
    store.engines.scale("train", 2)  # asked for again, it is tried again
    supervisor.look()
    supervisor.carry_out()
    assert machine.lives("engine 1")
    supervisor.close()


def test_an_order_of_the_moment_is_not_taken_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is given up while it is ordered once more."""
    machine, store = Machine(), Store(url)
    supervisor, replacements = added(machine, store, url)
    machine.processes["engine 1"].status = 1
    assert replacements.replace_dead()
    supervisor.carry_out()
    read = supervisor._store.engines.own

    def read_and_order() -> list[RegisteredEngine]:
        found = read()
        for number in (1, 2):
            store.engines.scale("train", number)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(supervisor._store.engines, "own", read_and_order)
        supervisor.look()
    assert store.engines.own()[1].wanted is SERVING
    supervisor.look()
    supervisor.carry_out()
    assert machine.lives("engine 1")
    supervisor.close()


def serving(
    machine: Machine, store: Store, url: str, numbers: Sequence[int], left: int = 1
) -> tuple[orders.EngineOrders, replace.Replacements]:
    """Supervisor of a job with these engines of one worker, which serve."""
    specs = [Spec(f"engine {n}", ("w",), {}, f"engine {n}", listens=f"h:{n}", gpus=(n,)) for n in numbers]
    store.engines.register([RegisteredEngine(n, f"http://h:{n}", 1, SERVING, SERVING) for n in numbers])
    replacements = replace.Replacements([Started(machine.start(spec), machine, spec) for spec in specs], left)  # type: ignore[arg-type]
    return orders.EngineOrders(Store(url), replacements, 0.0, 1, machine), replacements


def with_two(
    machine: Machine, store: Store, url: str, left: int = 1
) -> tuple[orders.EngineOrders, replace.Replacements]:
    """Supervisor of a job with two engines that serve, and are to have two workers instead of one."""
    supervisor, replacements = serving(machine, store, url, ENGINES, left)
    assert replacements.replace_dead() and store.engines.scale("train", 2, 2) == (2, 0)
    return supervisor, replacements


@pytest.mark.parametrize("gpus", [False, True])
def test_engines_get_other_workers_one_after_another(url: str, gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs the GPUs of another begins when that one has ended."""
    machine, store, lived = Machine(), Store(url), list[list[str]]()
    if not gpus:
        place = machine.place
        without = lambda started: started._replace(spec=dataclasses.replace(started.spec, gpus=()))  # noqa: E731
        monkeypatch.setattr(machine, "place", lambda number, workers: without(place(number, workers)))
    supervisor, replacements = with_two(machine, store, url)
    for _ in range(4):
        supervisor.look()
        supervisor.carry_out()
        lived.append([f"{name} x{len(machine.specs[name].argv)}" for name in sorted(machine.living())])
        assert replacements.replace_dead()
    meanwhile = ["engine 0 x2"] if gpus else ["engine 0 x2", "engine 1 x1"]
    assert lived == [meanwhile, *[["engine 0 x2", "engine 1 x2"]] * 3]
    supervisor.look()
    assert [(e.workers, e.state, e.done, e.orders) for e in store.engines.own()] == [(2, SERVING, 1, 1)] * 2
    supervisor.close()


def test_engines_that_do_not_start_with_other_workers_keep_theirs(url: str, caplog: pytest.LogCaptureFixture) -> None:
    machine, store = Machine(), Store(url)
    supervisor, replacements = with_two(machine, store, url)
    supervisor.look()
    supervisor.carry_out()
    assert machine.living() == ["engine 0"]
    machine.processes["engine 0"].status = 1
    for _ in range(3):
        assert replacements.replace_dead()
        supervisor.carry_out()
        supervisor.look()
    assert [(e.workers, e.wanted, e.state) for e in store.engines.own()] == [(1, SERVING, SERVING)] * 2
    assert [machine.specs[f"engine {n}"].argv for n in ENGINES] == [("w",)] * 2
    assert "engine 0 has 1 workers again: it ended before it served" in caplog.text
    supervisor.close()


def test_the_last_engine_is_never_given_up(url: str) -> None:
    """It got other workers and served. It dies, and the one in its place ends by itself: the attempt fails."""
    machine, store = Machine(), Store(url)
    supervisor, replacements = serving(machine, store, url, [0])
    store.engines.scale("train", 1, 2)
    for _ in range(3):
        supervisor.look()
        supervisor.carry_out()
        assert replacements.replace_dead()
    assert len(machine.specs["engine 0"].argv) == 2
    machine.processes["engine 0"].status = -9
    assert replacements.replace_dead() and machine.lives("engine 0")
    machine.processes["engine 0"].status = 1
    assert not replacements.replace_dead()
    supervisor.look()
    supervisor.carry_out()
    assert store.engines.own()[0].wanted is SERVING
    supervisor.close()


def follow(supervisor: orders.EngineOrders, replacements: replace.Replacements) -> None:
    """Let the supervisor go on for a while. Raises JobError where the attempt fails by an order."""
    for _ in range(3):
        supervisor.look()
        supervisor.carry_out()
        assert replacements.replace_dead()


def test_an_engine_is_not_given_up_once_the_others_are_ordered_away(url: str) -> None:
    """Another one is there as it is found not to start, and is ordered away before the store is told."""
    machine, store = Machine(), Store(url)
    supervisor, replacements = with_two(machine, store, url)
    follow(supervisor, replacements)
    follow(supervisor, replacements)
    machine.broken.add("engine 0")
    machine.processes["engine 0"].status = -9
    assert replacements.replace_dead()
    assert replacements.replace_dead()
    store.engines.scale("train", 1)
    with pytest.raises(JobError, match="engine 0 does not start, and no other one is wanted: it ended before"):
        follow(supervisor, replacements)
    assert store.engines.own()[0].wanted is SERVING
    supervisor.close()


def test_an_engine_that_has_never_served_is_not_given_up_as_the_last_one(url: str) -> None:
    """It was added, and starts while the other one is found not to start and is given up."""
    machine, store = Machine(), Store(url)
    supervisor, replacements = serving(machine, store, url, [0])
    store.engines.scale("train", 1, 2)
    follow(supervisor, replacements)
    machine.starting.add("engine 1")
    store.engines.scale("train", 2)
    follow(supervisor, replacements)
    machine.broken.add("engine 0")
    machine.processes["engine 0"].status = -9
    follow(supervisor, replacements)
    follow(supervisor, replacements)
    assert [engine.wanted for engine in store.engines.own()] == [ABSENT, SERVING]
    machine.processes["engine 1"].status = 1
    with pytest.raises(JobError, match="engine 1 does not start, and no other one is wanted: it ended before"):
        follow(supervisor, replacements)
    supervisor.close()


def test_of_two_engines_that_fail_at_once_one_is_not_given_up(url: str) -> None:
    machine, store = Machine(), Store(url)
    supervisor, replacements = with_two(machine, store, url, left=2)
    for _ in range(4):
        supervisor.look()
        supervisor.carry_out()
        assert replacements.replace_dead()
    for n in ENGINES:
        machine.processes[f"engine {n}"].status = -9
    assert replacements.replace_dead()
    for n in ENGINES:
        machine.processes[f"engine {n}"].status = 1
    assert not replacements.replace_dead()
    supervisor.close()


def test_a_colocated_engine_starts_on_the_gpu_of_a_trainer_rank(url: str) -> None:
    machine, store = Machine(), Store(url)
    engine = Spec("engine 0", ("w",), {}, "engine 0", listens="h:0", gpus=(0,))
    rank = Process("trainer rank 0")
    started = [
        Started(NotStarted(engine.name, Path(engine.log)), machine, engine),  # type: ignore[arg-type]
        Started(rank, machine, Spec(rank.name, ("t",), {}, rank.name, gpus=(0,))),  # type: ignore[arg-type]
    ]
    store.engines.register([RegisteredEngine(0, "http://h:0", 1, ABSENT, ABSENT)])
    supervisor = orders.EngineOrders(Store(url), replace.Replacements(started, 1), 0.0, 1, machine)
    store.engines.order(0, SERVING)
    supervisor.look()
    supervisor.carry_out()
    assert machine.lives("engine 0")
    supervisor.close()


def test_replacements_are_refilled_by_each_step(url: str) -> None:
    machine, store = Machine(), Store(url)
    supervisor, replacements = added(machine, store, url)
    for _ in range(3):
        machine.processes["engine 0"].status = -9
        assert replacements.replace_dead() and machine.lives("engine 0")
        store.journal.record_step(store.journal.last_step() + 1, {})
        supervisor.look()
        supervisor.carry_out()
    for replaced in (True, False):  # two deaths without a step between them
        machine.processes["engine 0"].status = -9
        assert replacements.replace_dead() is replaced
    assert "used up (engine 0 1x)" in replacements.used_up
    supervisor.close()
