"""Orders with which a trainer has its engines come and leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.buffer.store import Store
from megarl.config.schema import Config, RolloutConfig
from megarl.core.errors import EngineError
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn
from megarl.train.ranks import RunContext
from megarl.train.sync.colocated import ColocatedEngines


class Engines:
    """The registry of a job with two colocated engines, and its trainer's publisher."""

    def __init__(self, folder: Path, offload: Any, *, fault: str = "") -> None:
        self.url = f"sqlite:///{folder}/store.db"
        self.store = Store(self.url)
        self.store.engines.register([EngineRow("train", n, url=f"http://{n}", turn=EngineTurn.AWAY) for n in range(2)])
        self.parted = 0
        self.died: list[str] = []
        publisher: Any = SimpleNamespace(sleep=self.sleep, part=self.part, died=lambda: self.died)
        ranks: Any = SimpleNamespace(agree=lambda yes: yes)
        config = Config(rollout=RolloutConfig(placement="colocated", offload=offload, start_timeout_s=1.0))
        self.fault = fault
        self.turns = ColocatedEngines(RunContext(config, folder, 1, 0), self.store, ranks, publisher)

    def sleep(self) -> dict[str, float]:
        if self.fault:
            raise EngineError(self.fault)
        return {"memory/engines/freed_bytes": 1.0}

    def part(self) -> None:
        self.parted += 1

    @property
    def turn(self) -> list[EngineTurn]:
        return [engine.turn for engine in self.store.engines.own()]


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[None]:
    """Orders are carried out a moment after they were given."""
    over = threading.Event()

    def supervise() -> None:
        store = Store(f"sqlite:///{tmp_path}/store.db")
        while not over.wait(0.05):
            for engine in store.engines.own():
                state = EngineStatus.ABSENT if engine.turn is EngineTurn.AWAY else EngineStatus.SERVING
                store.engines.note([replace(engine, state=state, done_turn=engine.turn_order)])
        store.close()

    thread = threading.Thread(target=supervise)
    thread.start()
    yield
    over.set()
    thread.join()


def test_engines_are_ended_when_the_supervisor_has_ended_them(tmp_path: Path, supervised: None) -> None:
    engines = Engines(tmp_path, "destroy")
    engines.turns.come()
    assert engines.turn == [EngineTurn.HERE, EngineTurn.HERE]
    assert engines.turns.leave() == {} and engines.parted == 1
    assert [(e.turn, e.state, e.done_turn) for e in engines.store.engines.own()] == [
        (EngineTurn.AWAY, EngineStatus.ABSENT, 2)
    ] * 2


def test_engines_sleep_once_the_supervisor_would_not_start_them_again(tmp_path: Path, supervised: None) -> None:
    engines = Engines(tmp_path, "sleep")
    engines.turns.come()
    engines.turns.leave()
    assert [(e.turn, e.done_turn) for e in engines.store.engines.own()] == [(EngineTurn.ASLEEP, 2)] * 2


def test_an_engine_that_was_started_awake_meanwhile_is_ended(tmp_path: Path, supervised: None) -> None:
    """It died after it was asleep, and before the supervisor had read the order."""
    engines = Engines(tmp_path, "sleep")
    engines.turns.come()
    engines.died = ["the engine at http://0 has been replaced"]
    assert engines.turns.leave() == {} and engines.parted == 1
    assert [(e.turn, e.state) for e in engines.store.engines.own()] == [(EngineTurn.AWAY, EngineStatus.ABSENT)] * 2


def test_engines_that_do_not_sleep_are_ended(tmp_path: Path, supervised: None) -> None:
    engines = Engines(tmp_path, "sleep", fault="no answer")
    engines.turns.come()
    assert engines.turns.leave() == {} and engines.parted == 1
    assert engines.turn == [EngineTurn.AWAY, EngineTurn.AWAY]
    engines.turns.come()
    assert engines.turn == [EngineTurn.HERE, EngineTurn.HERE]


def test_an_order_that_nobody_carries_out_is_an_error(tmp_path: Path) -> None:
    engines = Engines(tmp_path, "destroy")
    engines.turns.come()
    with pytest.raises(
        EngineError, match=r"engine 0 was ordered to leave .* and has not within rollout.start_timeout_s=1"
    ):
        engines.turns.leave()
