"""Orders for engines, deaths and the supervisor's looks in every sequence: no engine has two processes, none that was
ordered away is taken for dead or started again, and an order that is done has come to pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.explore.store import EngineStatus, RegisteredEngine, Store
from megarl.run.nodes.node import NotStarted, Spec, Started
from megarl.run.supervise import orders, replace

SERVING, ASLEEP, ABSENT = EngineStatus.SERVING, EngineStatus.ASLEEP, EngineStatus.ABSENT
ENGINES = (0, 1)
ACTIONS = st.one_of(
    st.tuples(st.just("order"), st.sampled_from(ENGINES), st.sampled_from([SERVING, ASLEEP, ABSENT])),
    st.tuples(st.just("die"), st.sampled_from(ENGINES), st.none()),
    st.tuples(st.sampled_from(["look", "supervise"]), st.none(), st.none()),
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
        self.processes: dict[str, Process] = {}

    def start(self, spec: Spec) -> Process:
        assert not self.lives(spec.name), f"{spec.name} is started twice"
        self.processes[spec.name] = Process(spec.name)
        return self.processes[spec.name]

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        for name in names:
            if name in self.processes:
                self.processes[name].status = -15

    def lives(self, name: str) -> bool:
        return name in self.processes and self.processes[name].status is None

    def fault(self) -> None:
        return None


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('orders')}/store.db"


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "LOOK_S", 3600.0)  # the test looks itself
        patch.setattr(replace, "SETTLE_S", 0.0)
        yield


@settings(max_examples=60, deadline=None)
@given(later=st.booleans(), actions=st.lists(ACTIONS, max_size=25))
def test_every_sequence(url: str, later: bool, actions: list[Any]) -> None:
    machine, store = Machine(), Store(url)
    names = [f"engine {number}" for number in ENGINES]
    specs = [Spec(name, (), {}, name) for name in names]
    started = [Started(NotStarted(s.name, Path(s.log)) if later else machine.start(s), machine, s) for s in specs]  # type: ignore[arg-type]
    wanted, state = (ABSENT, ABSENT) if later else (SERVING, EngineStatus.STARTING)
    store.register_engines([RegisteredEngine(n, f"http://{n}", 1, wanted, state) for n in ENGINES])
    replacements = replace.Replacements(started, left=1000)
    supervisor = orders.EngineOrders(Store(url), replacements, grace_s=0.0)

    known: dict[int, EngineStatus] = {}

    def look() -> None:
        supervisor.look()
        for engine in store.own_engines():
            known[engine.number] = engine.wanted
            if engine.done == engine.orders > 0 and engine.wanted is ABSENT:
                assert engine.state is ABSENT and not machine.lives(names[engine.number])

    def supervise() -> None:
        left = [names[n] for n, wanted in known.items() if wanted is not SERVING and not machine.lives(names[n])]
        supervisor.carry_out()
        assert replacements.replace_dead()
        assert not any(machine.lives(name) for name in left), "started again though it is not wanted"

    for action, number, asked in actions:
        if action == "order":
            store.order_engine(number, asked)
        elif action == "die" and machine.lives(names[number]):
            machine.processes[names[number]].status = -9
        elif action == "look":
            look()
        elif action == "supervise":
            supervise()
    for step in (look, supervise, look):
        step()
    for engine in store.own_engines():
        assert engine.done == engine.orders
        if engine.wanted is not ASLEEP:
            assert machine.lives(names[engine.number]) is (engine.wanted is SERVING)
    supervisor.close()
    store.close()
