"""Engines of a run in every sequence of orders, deaths, looks, publications, evaluations, turns and requests, where
each actor knows what it has read last; on rows in memory, and in the store.

Each fault that is put into the rules must break what its sequence shows to hold."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.buffer.store import Store
from megarl.core.schema import WeightsVersion
from megarl.engines import fleet
from megarl.engines.fleet import EngineRow, EngineTurn
from tests.conftest import examples

PROGRAM = "train"
REPLACEMENTS = 2
ROOM = 6
"""Workers of all engines together."""
NONE = WeightsVersion(0, 0)


class Rows(Protocol):
    """Where the rows are."""

    def all(self) -> list[EngineRow]: ...
    def insert(self, rows: list[EngineRow]) -> None: ...
    def scale(self, number: int, workers: int | None) -> None: ...
    def write(self, number: int, event: str, **values: Any) -> None:
        """Change a row, if it is there."""

    def remove(self, number: int) -> None: ...


class InMemory:
    def __init__(self, rules: Any) -> None:
        self.rules = rules
        self.rows: dict[int, EngineRow] = {}

    def all(self) -> list[EngineRow]:
        return [self.rows[number] for number in sorted(self.rows)]

    def insert(self, rows: list[EngineRow]) -> None:
        self.rows = {row.number: row for row in rows}

    def scale(self, number: int, workers: int | None) -> None:
        self.insert(self.rules.scaled(self.all(), number, workers))

    def write(self, number: int, event: str, **values: Any) -> None:
        if number in self.rows and event == "delivered":
            self.rows[number] = self.rows[number].with_weights(fleet.BASE, **values)
        elif number in self.rows:
            self.rows[number] = self.rules.change(self.rows[number], event, **values)

    def remove(self, number: int) -> None:
        if number in self.rows and self.rules.Fleet([self.rows[number]]).ended():
            del self.rows[number]


class InStore:
    """``Store.engines``, with the calls of each actor."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.engines = self.store.engines

    def all(self) -> list[EngineRow]:
        return self.engines.own()

    def insert(self, rows: list[EngineRow]) -> None:
        self.engines.register(rows)

    def scale(self, number: int, workers: int | None) -> None:
        self.engines.scale(PROGRAM, number, workers)

    def write(self, number: int, event: str, **values: Any) -> None:
        if event == "turned":
            self.engines.turn([number], values["turn"])
        elif event == "delivered":
            [row] = [row for row in self.all() if row.number == number] or [EngineRow(PROGRAM, number)]
            self.engines.delivered({(PROGRAM, number): row.start}, values["version"])
        elif event == "held":
            self.engines.hold([(PROGRAM, number)], values["holds_for"])
        elif event == "freed":
            self.engines.free()
        elif rows := [row for row in self.all() if row.number == number]:
            self.engines.note([fleet.change(rows[0], event, **values)])

    def remove(self, number: int) -> None:
        self.engines.remove(number)


@dataclasses.dataclass
class Running:
    """A process as it truly is."""

    start: int
    workers: int
    alive: bool = True
    listens: bool = False
    served: bool = False
    how: str = ""
    version: WeightsVersion | None = None
    refusing: bool = True
    asleep: bool = False
    busy: bool = False
    """It answers no look for the moment."""


class World:
    """A job with engines, which take turns with the trainer where they are ``shared``."""

    def __init__(self, begin: int, shared: bool, rows: Rows, rules: Any = fleet, careless: str = "") -> None:
        self.rules, self.shared, self.careless, self.rows = rules, shared, careless, rows
        self.serial, self.replaced, self.evaluations = 0, 0, 0
        self.failed_attempt = ""
        # the supervisor
        self.seen: list[EngineRow] = []
        self.processes: dict[int, list[Running]] = {}
        self.replacements = rules.Replacements(REPLACEMENTS)
        # the trainer
        self.version, self.published = WeightsVersion(1, 0), WeightsVersion(1, 0)
        self.joined: dict[int, int] = {}
        self.sending: list[tuple[int, int]] = []
        self.failed = self.computing = False
        self.held: tuple[str, WeightsVersion, dict[int, int]] | None = None
        # the explorer
        self.view: list[EngineRow] = []
        self.claimed: tuple[str, WeightsVersion] | None = None
        turn = rules.EngineTurn.AWAY if shared else rules.EngineTurn.HERE
        rows.insert([rules.EngineRow(PROGRAM, n, turn=turn) for n in range(begin)])

    def row(self, number: int) -> EngineRow | None:
        return next((row for row in self.rows.all() if row.number == number), None)

    # -- megarl scale

    def scale(self, number: int, workers: int | None) -> None:
        size = workers or max(row.wanted_workers for row in self.rows.all())
        if not self.shared and number * size <= ROOM:
            self.rows.scale(number, workers)

    # -- the machine

    def living(self) -> list[tuple[int, Running]]:
        return [(number, one) for number, all_ in self.processes.items() for one in all_ if one.alive]

    def running(self, number: int) -> Running | None:
        return next((one for one in self.processes.get(number, []) if one.alive), None)

    def come_up(self, number: int) -> None:
        if one := self.running(number):
            one.listens = True

    def busy(self, number: int) -> None:
        if one := self.running(number):
            one.busy = not one.busy

    def die(self, number: int, how: str) -> None:
        if one := self.running(number):
            one.alive, one.how = False, how

    # -- the supervisor

    def look(self) -> None:
        self.seen = self.rows.all()

    def supervise(self) -> None:
        if self.failed_attempt:
            return
        known = {}
        for number, processes in self.processes.items():
            if processes:
                one = processes[-1]
                one.served = one.served or (one.alive and one.listens)
                known[number] = self.rules.EngineProcess(one.workers, one.served, "" if one.alive else one.how)
        for action in self.rules.decide(self.seen, known, self.replacements):
            self.act(action)

    def act(self, action: Any) -> None:
        number, row = action.number, self.row(action.number)
        if action.what == "fail":
            self.failed_attempt = action.why
        elif action.what == "remove":
            self.rows.remove(number)
        elif action.what == "write":
            self.rows.write(number, action.event, **action.values)
        elif action.what == "start" and row is not None:
            self.serial += 1
            assert self.running(number) is None, f"engine {number} has two processes"
            values = action.values | {"start": self.serial, "url": f"http://{self.serial}"}
            self.rows.write(number, action.event, **values)
            self.processes.setdefault(number, []).append(Running(self.serial, action.workers))
        elif action.what in ("end", "clear"):
            here = row is not None and row.is_present and row.turn is self.rules.EngineTurn.HERE
            self.replaced += here and action.what == "clear"
            if row is not None and row.state in (self.rules.EngineStatus.STARTING, self.rules.EngineStatus.SERVING):
                self.rows.write(number, "ends")
            for one in self.processes.get(number, []):
                one.alive, one.how = False, one.how or "signal"
            self.processes[number] = []
            self.rows.write(number, "gone")

    def step(self) -> None:
        """The trainer has recorded a step, and the supervisor has read that."""
        self.replacements.refill()
        self.replaced = 0

    # -- the trainer

    def fleet(self) -> Any:
        return self.rules.Fleet(self.rows.all())

    def join(self) -> None:
        self.joined, self.sending = {}, []
        for row in self.fleet().to_join(begun=self.version.n > 0, together=self.shared):
            one = self.running(row.number)
            if one and one.listens and not one.asleep and not one.busy and row.start == one.start:
                self.joined[row.number] = one.start

    def publish(self) -> None:
        """Begin a publication to the engines that are joined and behind."""
        if self.shared and self.computing:
            return
        self.settle_hold()
        self.join()
        self.version = WeightsVersion(1, self.version.n + 1)
        behind = {row.number for row in self.fleet().behind(self.version)}
        self.sending = [(n, start) for n, start in self.joined.items() if n in behind]
        self.failed = False

    def settle_hold(self) -> None:
        """Give an evaluation up whose engines have lost its weights, or are all that is left."""
        if self.held is None:
            return
        _, version, engines = self.held
        rows = {row.number: row for row in self.rows.all()}
        lost = any(n not in rows or rows[n].has != version or rows[n].start != s for n, s in engines.items())
        others = [row for row in self.fleet().to_join(begun=True) if row.number not in engines]
        if lost or not others:
            self.free()

    def send(self) -> None:
        """Send to one engine: it is paused, takes the weights, proves them, and goes on; its row is written last."""
        if not self.sending:
            return
        number, start = self.sending.pop(0)
        one = self.running(number)
        if one is None or one.start != start:
            self.failed = True  # the link is broken
            return
        if self.held is not None:
            assert self.held[2].get(number) != start, "an engine that keeps weights is updated"
        one.version, one.refusing = self.version, False
        if (row := self.row(number)) and row.start == start:
            self.rows.write(number, "delivered", version=self.version)
        if not self.sending and not self.failed:
            self.published = self.version

    def cut(self) -> None:
        """A publication is cut off in the middle of an engine's update."""
        if not self.sending:
            return
        number, start = self.sending[0]
        if (one := self.running(number)) and one.start == start:
            one.refusing = True
            row = self.row(number)
            if row is not None and row.start == start and self.careless != "a cut update stays written":
                self.rows.write(number, "delivered", version=None)
            self.sending, self.failed = [], True

    def hold(self, count: int) -> None:
        if self.held is not None or self.sending or self.shared:
            return
        engines = self.fleet().to_hold(count, self.version)
        if not engines:
            return
        self.evaluations += 1
        name = f"evaluation {self.evaluations}"
        for row in engines:
            self.rows.write(row.number, "held", holds_for=name)
        self.held = (name, self.version, {row.number: row.start for row in engines})
        others = [row for row in self.fleet().present() if row.number not in self.held[2]]
        assert others, "no engine is left for training"

    def free(self) -> None:
        if self.held is not None:
            for number in self.held[2]:
                self.rows.write(number, "freed", holds_for="")
            self.held = None

    def turn(self, turn: EngineTurn) -> None:
        if not self.shared:
            return
        if turn is self.rules.EngineTurn.HERE:
            self.computing = False
        else:
            self.sending = []
        for row in self.rows.all():
            if row.turn is not turn:
                keeps = turn is self.rules.EngineTurn.HERE or self.careless == "one that sleeps keeps its version"
                lost = {} if keeps else {"weights": ()}
                self.rows.write(row.number, "turned", turn=turn, turn_order=row.turn_order + 1, **lost)
        if turn is self.rules.EngineTurn.ASLEEP:
            for number, start in self.joined.items():
                if (one := self.running(number)) and one.start == start and one.listens:
                    one.asleep, one.refusing, one.version = True, True, None
        elif turn is self.rules.EngineTurn.HERE:
            for _, one in self.living():
                one.asleep = False

    def compute(self) -> None:
        """Take the devices, once all have left them."""
        rows = self.rows.all()
        if not self.shared or any(row.turn is self.rules.EngineTurn.HERE for row in rows):
            return
        done = all(row.done_turn == row.turn_order for row in rows) or self.careless == "sleep is not acknowledged"
        if done and all(one.asleep for _, one in self.living()):
            self.computing = True

    # -- the explorer

    def read(self) -> None:
        self.view = self.rows.all()
        if self.held is not None:
            self.claimed = self.held[:2]

    def ask(self, back: int, evaluates: bool) -> None:
        oldest, newest, rollout = WeightsVersion(1, max(1, self.published.n - back)), None, ""
        if evaluates:
            if self.claimed is None:
                return
            rollout, oldest = self.claimed
            newest = oldest
        is_fresh = self.view == self.rows.all()
        for row in self.rules.Fleet(self.view).usable(oldest, rollout):
            one = self.running(row.number)
            if one is None or not one.listens or one.asleep:
                continue
            is_refused = one.refusing or self.rules.refusal(
                self.rules.WeightsAsked(row.start, oldest, newest), one.start, one.version
            )
            if is_refused:
                assert not (is_fresh and one.start == row.start), "an engine is asked that is known to refuse"
                continue
            assert (one.version or NONE) >= oldest, "tokens of older weights"
            assert newest is None or (one.version or NONE) <= newest, "tokens of newer weights than the evaluation's"
            assert row.holds_for == rollout, "an engine that keeps weights is asked for others"

    # -- what holds at any time

    def check(self) -> None:
        if self.held is not None:
            _, version, engines = self.held
            for number, start in engines.items():
                one = self.running(number)
                assert one is None or one.start != start or one.version == version, "an engine lost what it keeps"
        if self.computing:
            assert all(one.asleep for _, one in self.living()), "an engine is awake on the trainer's devices"
        assert self.replaced <= REPLACEMENTS or not self.shared, "more replacements than there are"
        for row in self.rows.all():
            one = self.running(row.number)
            if row.has and row.turn is self.rules.EngineTurn.HERE and one is not None and one.start == row.start:
                assert not one.refusing and (one.version or NONE) >= row.has, "a row says more than the engine has"
            if row.is_done and not row.is_present and row.state is self.rules.EngineStatus.ABSENT:
                assert one is None, "an order is done and has not come to pass"

    def settle(self) -> None:
        """Let everybody do what is left: a world in which nothing more happens comes to rest as it was ordered."""
        if self.shared:
            self.turn(self.rules.EngineTurn.HERE)
        for _, one in self.living():
            one.busy = False
        for _ in range(15):
            self.step()
            self.look()
            self.supervise()
            for number in list(self.processes):
                self.come_up(number)
            self.check()
            self.publish()
            while self.sending:
                self.send()
        if self.failed_attempt:
            return
        assert any(row.is_present for row in self.rows.all()), "no engine is left"
        self.free()
        for _ in range(3):
            self.publish()
            while self.sending:
                self.send()
        for row in self.rows.all():
            one = self.running(row.number)
            assert row.is_done, f"an order is never done: {row}"
            assert row.wanted, "the row of an engine that has left does not end"
            assert row.is_present == (one is not None)
            if one is not None:
                assert one.workers == row.fits == row.workers and row.start == one.start
                assert row.has == self.version, "an engine is never given weights"
        assert {number for number, _ in self.living()} <= {row.number for row in self.rows.all()}, "it has no row"


NUMBERS = st.integers(0, 4)
ACTIONS = st.one_of(
    st.tuples(st.just("scale"), st.integers(1, 4), st.sampled_from([None, 1, 2])),
    st.tuples(st.sampled_from(["come_up", "busy"]), NUMBERS),
    st.tuples(st.just("die"), NUMBERS, st.sampled_from(["signal", "itself"])),
    st.tuples(st.sampled_from(["look", "supervise", "publish", "send", "cut", "free", "step", "compute", "read"])),
    st.tuples(st.just("hold"), st.integers(1, 2)),
    st.tuples(st.just("turn"), st.sampled_from(list(EngineTurn))),
    st.tuples(st.just("ask"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("round")),
)
WORLDS = {"begin": st.integers(1, 3), "shared": st.booleans(), "actions": st.lists(ACTIONS, max_size=40)}
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def a_round(world: World) -> None:
    """Have happen what mostly happens."""
    world.look()
    world.supervise()
    for number in list(world.processes):
        world.come_up(number)
    world.supervise()
    world.publish()
    while world.sending:
        world.send()
    world.read()


def live(world: World, actions: Sequence[Any]) -> None:
    """Have these actions happen, and then nothing more. Raises AssertionError where something does not hold."""
    world.look()
    for what, *given_ in actions:
        if what == "round":
            a_round(world)
        else:
            getattr(world, what)(*given_)
        world.check()
    world.settle()


@pytest.mark.timeout(3600)
@settings(max_examples=examples(400, 100_000), deadline=None, suppress_health_check=QUIET)
@given(**WORLDS)
def test_every_sequence(begin: int, shared: bool, actions: list[Any]) -> None:
    live(World(begin, shared, InMemory(fleet)), actions)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('fleet')}/store.db"


@pytest.mark.timeout(3600)
@settings(max_examples=examples(5, 500), deadline=None, suppress_health_check=QUIET)
@given(**WORLDS)
def test_every_sequence_in_the_store(url: str, begin: int, shared: bool, actions: list[Any]) -> None:
    live(World(begin, shared, InStore(url)), actions)


ROUND = ("round",)
LOOK = (("look",), ("supervise",))
WIDE = (ROUND, ("scale", 2, 2), *[ROUND] * 4)
DIES = (("die", 0, "signal"), ("supervise",), ("die", 0, "itself"))
TO_TURN = (("turn", EngineTurn.HERE), ROUND)
IN_RULES: dict[str, tuple[str, str, str, tuple[int, bool, list[Any]]]] = {
    "engines without the weights are asked": (
        "if oldest is None or (row.has is not None and row.has >= oldest)]",
        "]",
        "known to refuse",
        (2, False, [ROUND, ("die", 1, "signal"), *LOOK, ("come_up", 1), ("read",), ("ask", 0, False)]),
    ),
    "newer weights answer": (
        "asked.newest is not None and version > asked.newest",
        "False",
        "tokens of newer weights",
        (2, False, [ROUND, ("hold", 1), ("read",), ("free",), ("publish",), ("send",), ("send",), ("ask", 0, True)]),
    ),
    "what an earlier start had counts": (
        "serves and w.start == self.start",
        "True",
        "a row says more",
        (2, False, [ROUND, ("die", 0, "signal"), ("look",), ("supervise",)]),
    ),
    "one that dies asleep is started": (
        "dies_asleep = row.turn is EngineTurn.ASLEEP and",
        "dies_asleep = False and",
        "awake on the trainer's devices",
        (1, True, [*TO_TURN, ("turn", EngineTurn.ASLEEP), *LOOK, ("compute",), ("die", 0, "signal"), ("supervise",)]),
    ),
    "rows stay": (
        "if not e.wanted and e.state",
        "if False and e.state",
        "row of an engine that has left",
        (2, False, [ROUND, ("scale", 1, None)]),
    ),
    "the last engine is left out": (
        "if rows and not counted and not any(row.turn",
        "if False and not any(row.turn",
        "no engine is left",
        (2, False, [*WIDE, *DIES, ("scale", 1, None), ("supervise",)]),
    ),
    "one that is to get other workers waits for new ones": (
        "if o not in unfit and o.number in processes]",
        "if o not in unfit and o.number in processes] + [EngineProcess(0)][: len(counted) - len(processes)]",
        "an order is never done",
        (1, False, [ROUND, ("scale", 2, 2)]),
    ),
    "replacements never end": (
        "if self.left < 1:",
        "if False:",
        "more replacements",
        (1, True, [*TO_TURN, *[("die", 0, "signal"), ("supervise",), ("come_up", 0)] * 3]),
    ),
    "one that keeps weights is updated": (
        "if row.has != version and not (row.holds_for and row.has)]",
        "if row.has != version]",
        "keeps weights is updated",
        (2, False, [ROUND, ("hold", 1), ROUND]),
    ),
    "all engines evaluate": (
        "having[: min(count, len(having) - 1)]",
        "having[:count]",
        "no engine is left for training",
        (2, False, [ROUND, ("hold", 2)]),
    ),
}  # fmt: skip
"""Fault -> the text of the rules that it replaces, what replaces it, what it breaks, and a sequence that shows it."""
IN_ACTORS: dict[str, tuple[str, tuple[int, bool, list[Any]]]] = {
    "sleep is not acknowledged": (
        "awake on the trainer's devices",
        (1, True, [*TO_TURN, ("turn", EngineTurn.ASLEEP), ("compute",), ("die", 0, "signal"), ("supervise",)]),
    ),
    "one that sleeps keeps its version": (
        "a row says more",
        (1, True, [*TO_TURN, ("turn", EngineTurn.ASLEEP), ("turn", EngineTurn.HERE)]),
    ),
    "a cut update stays written": ("a row says more", (1, False, [ROUND, ("publish",), ("cut",)])),
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_RULES)
def test_faults_of_the_rules_are_found(fault: str) -> None:
    """Each sequence breaks what holds with the fault, and nothing without it."""
    before, after, broken, (begin, shared, actions) = IN_RULES[fault]
    live(World(begin, shared, InMemory(fleet)), actions)
    source = Path(fleet.__file__).read_text()
    assert source.count(before) == 1, f"the rules do not have {before!r} once"
    faulty = types.ModuleType("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "faulty", faulty)  # where dataclasses look for types
        exec(compile(source.replace(before, after), "faulty", "exec"), faulty.__dict__)
        with pytest.raises(AssertionError, match=broken):
            live(World(begin, shared, InMemory(faulty), faulty), _of(faulty, actions))


def _of(rules: Any, actions: Sequence[Any]) -> list[Any]:
    """Actions with the turns of these rules."""
    return [
        tuple(rules.EngineTurn(part) if isinstance(part, EngineTurn) else part for part in action) for action in actions
    ]


@pytest.mark.parametrize("fault", IN_ACTORS)
def test_faults_of_actors_are_found(fault: str) -> None:
    broken, (begin, shared, actions) = IN_ACTORS[fault]
    live(World(begin, shared, InMemory(fleet)), actions)
    with pytest.raises(AssertionError, match=broken):
        live(World(begin, shared, InMemory(fleet), careless=fault), actions)


def test_each_column_has_one_writer() -> None:
    columns = [name for names in fleet.COLUMNS.values() for name in names]
    assert len(columns) == len(set(columns))
    assert {field.name for field in dataclasses.fields(EngineRow)} == {*columns, "program", "number"}
    for event, rule in fleet.EVENTS.items():
        assert rule.columns | ({"state"} if rule.to else set()) <= fleet.COLUMNS[rule.writer], event


def test_an_engine_that_can_generate_is_left_while_others_get_other_workers() -> None:
    """The one that has them first is given weights by the next publication: until then the second one goes on."""
    world = World(2, False, InMemory(fleet))
    for _ in range(3):
        a_round(world)
    world.scale(2, 2)

    def supervised(rounds: int) -> list[int]:
        for _ in range(rounds):
            world.look()
            world.supervise()
            for number in list(world.processes):
                world.come_up(number)
            assert any(row.has for row in world.rows.all()), "nobody can generate"
        return [row.workers for row in world.rows.all()]

    assert supervised(5) == [2, 1]
    world.publish()
    while world.sending:
        world.send()
    assert supervised(5) == [2, 2]


@pytest.mark.parametrize("in_store", [False, True])
def test_weights_of_each_name_are_proven_by_a_start(url: str, in_store: bool) -> None:
    """Those of an adapter stay beside new ones of the model, and go with the process."""
    first, second, adapter = WeightsVersion(1, 1), WeightsVersion(1, 2), "math"
    row = EngineRow(PROGRAM, 0, state=fleet.EngineStatus.SERVING, start=7)
    store = Store(url)

    def given(row: EngineRow, version: WeightsVersion | None, what: str) -> EngineRow:
        if not in_store:
            return row.with_weights(what, version)
        store.engines.delivered({row.key: row.start}, version, what)
        return store.engines.own()[0]

    try:
        store.engines.register([row])
        row = given(given(given(row, first, fleet.BASE), first, adapter), second, fleet.BASE)
        assert (row.has, row.proven(adapter), row.proven("other")) == (second, first, None)
        again = dataclasses.replace(row, start=8)
        assert (again.has, again.proven(adapter)) == (None, None)
        store.engines.register([again])
        again = given(again, second, fleet.BASE)
        assert [weights.what for weights in again.weights] == [fleet.BASE], "an earlier start's are nobody's"
        assert given(given(again, first, adapter), None, fleet.BASE).weights == ()
    finally:
        store.close()


def test_other_changes_are_forbidden() -> None:
    row = EngineRow(PROGRAM, 0)
    for event, values in (
        ("listens", {}),
        ("started", {"start": 0}),
        ("ordered", {"order": 2}),
        ("noted", {"wanted": 0}),
    ):
        with pytest.raises(fleet.Forbidden):
            fleet.change(row, event, **values)  # type: ignore[arg-type]
