"""Orders for engines, deaths and the supervisor's looks in every sequence, with processes and GPUs of a machine.

No engine has two processes, none that was ordered away is taken for dead or started again, an order that is done has
come to pass, and the supervisor does not leave out the last engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.buffer.store import Store
from megarl.core.errors import ConfigError, JobError
from megarl.engines.client.names import START
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn, Replacements
from megarl.run.nodes.node import NotStarted, Spec, Started
from megarl.run.supervise import process_units
from megarl.run.supervise.engines import EngineSupervisor, RowsInStore, first_rows
from tests.conftest import examples

SERVING, ABSENT = EngineStatus.SERVING, EngineStatus.ABSENT
ENGINES = (0, 1)
ACTIONS = st.one_of(
    st.tuples(st.just("turn"), st.sampled_from(ENGINES), st.sampled_from(list(EngineTurn))),
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
        patch.setattr(process_units, "SETTLE_S", 0.0)
        patch.setattr(process_units, "LOOK_S", 0.0)
        patch.setattr(process_units, "is_listening", lambda address: machines[-1].listens(f"engine {address[2:]}"))
        yield


class Supervised:
    """A job whose supervisor looks into the store, and acts, when it is told to.

    Args:
        numbers: Engines of one worker that it begins with.
        away: They are started by order.
        left: Replacements.
    """

    def __init__(self, url: str, numbers: Sequence[int] = ENGINES, *, away: bool = False, left: int = 1) -> None:
        self.machine, self.store = Machine(), Store(url)
        specs = [Spec(f"engine {n}", ("w",), {}, f"engine {n}", listens=f"h:{n}", gpus=(n,)) for n in numbers]
        rows = first_rows(specs, "train", 1, 1, away=away)
        self.store.engines.register(rows)
        begin = lambda spec: NotStarted(spec.name, Path(spec.log)) if away else self.machine.start(spec)  # noqa: E731
        started = [Started(begin(spec), self.machine, spec) for spec in specs]  # type: ignore[arg-type]
        self.replacements = Replacements(left)
        self.units = process_units.Units(started, self.replacements)
        self.engines = EngineSupervisor(rows, self.units, self.replacements, 0.0, self.machine)
        self.rows = RowsInStore(Store(url), 3600.0)

    def look(self) -> None:
        self.rows.exchange(self.engines)
        self.engines.take(self.rows.look())

    def supervise(self) -> bool:
        """Return False where the attempt fails."""
        self.units.look()
        return self.engines.act()

    def follow(self, times: int = 3) -> None:
        """Look and supervise some times. Raises JobError where no engine is left."""
        for _ in range(times):
            self.look()
            assert self.supervise()
        self.look()

    def die(self, number: int, status: int) -> None:
        self.machine.processes[f"engine {number}"].status = status

    def own(self) -> list[EngineRow]:
        return self.store.engines.own()

    def scale(self, number: int, workers: int | None = None) -> tuple[int, int]:
        return self.store.engines.scale("train", number, workers)


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
    ("turn", 0, EngineTurn.AWAY),
    ("supervise", None, None),
    ("scale", 1, 1),
]


@settings(max_examples=examples(40, 400), deadline=None)
@example(away=False, actions=NARROWED)
@example(away=False, actions=NARROWED_WITHOUT_ONE)
@example(away=False, actions=LAST_OF_TWO)
@example(away=False, actions=SECOND_DOES_NOT_WIDEN)
@example(away=False, actions=ENDED_AS_IT_FAILS)
@given(away=st.booleans(), actions=st.lists(ACTIONS, max_size=25))
def test_every_sequence(url: str, away: bool, actions: list[Any]) -> None:
    job = Supervised(url, away=away, left=1000)
    machine = job.machine
    names = [f"engine {number}" for number in range(4)]
    known: dict[int, EngineRow] = {}

    def look() -> None:
        job.look()
        for row in job.own():
            known[row.number] = row
            if row.is_done and not row.is_present:
                assert row.state is ABSENT and not machine.lives(names[row.number])

    def supervise() -> bool:
        """Return False where the attempt fails."""
        left = [row for row in known.values() if row.turn is not EngineTurn.HERE or not row.wanted]
        dead = [names[row.number] for row in left if not machine.lives(names[row.number])]
        try:
            goes_on = job.supervise()
        except JobError:
            assert broken
            return False
        assert goes_on or broken
        assert not any(machine.lives(name) for name in dead), "started again though it is not wanted"
        return goes_on

    broken = any(action == "break" for action, _, _ in actions)
    scaled = any(action == "scale" and workers for action, _, workers in actions)
    for action, number, asked in actions:
        if scaled and asked is EngineTurn.ASLEEP:
            continue  # engines that take turns with the trainer are not scaled
        if action == "turn":
            job.store.engines.turn([number], asked)
        elif action == "die" and machine.lives(names[number]):
            job.die(number, -9)
        elif action == "scale":
            before = sum(row.wanted for row in job.own())
            assert job.scale(number, asked)[0] == before
            assert sum(row.wanted for row in job.own()) == number
        elif action == "step":
            job.store.journal.record_step(job.store.journal.last_step() + 1, {})
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
    for row in job.own():
        assert row.is_done and row.wanted
        if row.number > 2:
            assert row.refused == "no room" and not machine.lives(names[row.number])
        elif row.number not in ENGINES and machine.lives(names[row.number]):
            assert row.url == f"http://h:{row.number}"
        if row.turn is not EngineTurn.ASLEEP:
            assert machine.lives(names[row.number]) is row.is_present
        if machine.lives(names[row.number]):
            assert len(machine.specs[names[row.number]].argv) == row.workers == row.fits
            assert machine.specs[names[row.number]].env[START] == str(row.start)


def test_an_added_engine_that_does_not_start_is_left_out(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It ended by itself, which ends the attempt where the job began with the engine."""
    job = Supervised(url, [0])
    assert job.scale(2) == (1, 1)
    job.machine.starting.add("engine 1")
    job.follow()
    job.die(1, 1)
    job.follow()
    row = job.own()[1]
    assert row.wanted and row.state is ABSENT and row.refused.startswith("it ended before it served")
    assert "engine 1 is left out: it ended before it served" in caplog.text
    job.scale(2)  # asked for again, it is tried again
    job.follow()
    assert job.machine.lives("engine 1")


def test_an_engine_that_leaves_has_no_row_afterwards(url: str) -> None:
    job = Supervised(url)
    job.follow()
    job.scale(1)
    job.follow()
    assert [row.number for row in job.own()] == [0] and job.machine.living() == ["engine 0"]
    job.scale(2)
    job.follow()
    assert job.machine.living() == ["engine 0", "engine 1"] and all(row.is_done for row in job.own())


def test_an_engine_that_is_wanted_again_as_its_row_ends_keeps_it(url: str) -> None:
    job = Supervised(url)
    job.follow()
    job.scale(1)
    job.look()
    assert job.supervise()
    job.look()
    assert job.supervise() and list(job.engines.removing) == [1]
    job.scale(2)
    job.follow()
    assert job.machine.living() == ["engine 0", "engine 1"]
    assert [(row.wanted, row.is_done, row.state) for row in job.own()] == [(True, True, SERVING)] * 2


@pytest.mark.parametrize("gpus", [False, True])
def test_engines_get_other_workers_one_after_another(url: str, gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs the GPUs of another begins when that one has ended."""
    job, lived = Supervised(url), list[list[str]]()
    machine = job.machine
    if not gpus:
        place = machine.place
        without = lambda started: started._replace(spec=dataclasses.replace(started.spec, gpus=()))  # noqa: E731
        monkeypatch.setattr(machine, "place", lambda number, workers: without(place(number, workers)))
    job.follow()
    assert job.scale(2, 2) == (2, 0)
    for _ in range(4):
        job.follow(1)
        lived.append([f"{name} x{len(machine.specs[name].argv)}" for name in sorted(machine.living())])
    meanwhile = ["engine 0 x2"] if gpus else ["engine 0 x2", "engine 1 x1"]
    assert lived == [meanwhile, *[["engine 0 x2", "engine 1 x2"]] * 3]
    assert [(row.workers, row.state, row.is_done) for row in job.own()] == [(2, SERVING, True)] * 2


def test_engines_that_do_not_start_with_other_workers_keep_theirs(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The second one is not tried."""
    job = Supervised(url)
    job.follow()
    job.machine.broken.add("engine 0")
    job.scale(2, 2)
    job.follow(6)
    assert [(row.workers, row.fits, row.state) for row in job.own()] == [(1, 1, SERVING)] * 2
    assert [job.machine.specs[f"engine {n}"].argv for n in ENGINES] == [("w",)] * 2
    assert "engine 0 has 1 workers again: it ended before it served" in caplog.text
    assert "engine 1 has" not in caplog.text
    assert job.own()[1].refused.startswith("engine 0 did not start with them: it ended before it served")


def test_the_last_engine_is_never_left_out(url: str) -> None:
    """It got other workers and served. It dies, and the one in its place ends by itself: the attempt fails."""
    job = Supervised(url, [0])
    job.follow()
    job.scale(1, 2)
    job.follow()
    assert len(job.machine.specs["engine 0"].argv) == 2
    job.die(0, -9)
    assert job.supervise() and job.machine.lives("engine 0")
    job.die(0, 1)
    assert not job.supervise()
    assert job.own()[0].wanted


def test_an_engine_that_was_left_out_as_the_others_are_ordered_away_ends_the_attempt(url: str) -> None:
    job = Supervised(url)
    job.follow()
    job.scale(2, 2)
    job.follow(5)
    job.machine.broken.add("engine 0")
    job.die(0, -9)
    assert job.supervise() and job.supervise()
    job.scale(1)
    with pytest.raises(JobError, match="engine 0 does not start, and no other one is wanted: it ended before"):
        job.follow()


def test_of_two_engines_that_fail_at_once_one_is_not_left_out(url: str) -> None:
    job = Supervised(url, left=2)
    job.follow()
    job.scale(2, 2)
    job.follow(5)
    for status in (-9, 1):
        for number in ENGINES:
            job.die(number, status)
        assert job.supervise() is (status == -9)


def test_a_colocated_engine_starts_on_the_gpu_of_a_trainer_rank(url: str) -> None:
    job = Supervised(url, [0], away=True)
    rank = Process("trainer rank 0")
    job.units.give_place([Started(rank, job.machine, Spec(rank.name, ("t",), {}, rank.name, gpus=(0,)))])  # type: ignore[arg-type]
    job.units.absent.discard(rank.name)
    job.store.engines.turn([0], EngineTurn.HERE)
    job.follow()
    assert job.machine.lives("engine 0")


def test_engines_on_two_nodes_have_gpus_of_one_number(url: str) -> None:
    job, other = Supervised(url), Machine()
    other.rank = 1
    [engine] = job.units.members("engine 1")
    assert engine.spec is not None
    spec = dataclasses.replace(engine.spec, gpus=(0,))
    job.units.give_place([Started(other.start(spec), other, spec)])  # type: ignore[arg-type]
    job.units.absent.discard("engine 1")
    machines.append(job.machine)
    for number in ENGINES:
        job.engines.places[number, 1] = job.units.members(f"engine {number}")
    job.machine.processes["engine 1"].status = 0  # it is on the other node
    job.follow()
    job.die(0, -9)
    assert job.supervise() and job.machine.lives("engine 0") and other.lives("engine 1")


def test_one_that_dies_asleep_is_started_at_its_next_turn(url: str) -> None:
    job = Supervised(url, [0])
    job.follow()
    job.store.engines.turn([0], EngineTurn.ASLEEP)
    assert not job.own()[0].is_done
    job.follow()
    assert job.own()[0].is_done and job.machine.lives("engine 0")
    job.die(0, -9)
    job.follow()
    assert not job.machine.lives("engine 0")
    job.store.engines.turn([0], EngineTurn.HERE)
    job.follow()
    assert job.machine.lives("engine 0") and job.replacements.left == 1


def test_replacements_are_refilled_by_each_step(url: str) -> None:
    job = Supervised(url)
    job.follow()
    for _ in range(3):
        job.die(0, -9)
        assert job.supervise() and job.machine.lives("engine 0")
        job.store.journal.record_step(job.store.journal.last_step() + 1, {})
        job.look()
    for replaced in (True, False):  # two deaths without a step between them
        job.die(0, -9)
        assert job.supervise() is replaced
    assert "used up (engine 0 1x)" in job.units.used_up


def test_each_start_has_a_number_of_its_own(url: str) -> None:
    """Later attempts have higher ones."""
    job = Supervised(url)
    job.follow()
    seen = [row.start for row in job.own()]
    job.die(0, -9)
    job.follow()
    seen.append(job.own()[0].start)
    assert len(set(seen)) == 3 and seen == sorted(seen)
    [row] = first_rows([Spec("engine 0", (), {}, "")], "train", 2, 1, away=False)
    assert row.start > max(seen)
