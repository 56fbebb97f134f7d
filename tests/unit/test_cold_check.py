"""The engine that a cold check starts again serves when the check ends, so that the next publication joins it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.config import Config
from megarl.core.config.job import StoreConfig
from megarl.core.schema import WeightsVersion
from megarl.engine.client.control import EngineControl, EngineState
from megarl.engine.client.probe import Probed, ProbeText
from megarl.engine.fleet import EngineStatus, EngineTurn
from megarl.explore.store import Store
from megarl.train.parts.cold import ColdCheck
from megarl.train.rank.context import RunContext
from megarl.train.sync.own import OwnEngines
from tests.engine_rows import serving_row

SERVING, STARTING, ABSENT = EngineStatus.SERVING, EngineStatus.STARTING, EngineStatus.ABSENT
VERSION = WeightsVersion(1, 3)


def test_both_engines_are_joined_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor notes that one serves a while after its server answers."""
    monkeypatch.setattr(EngineControl, "health", lambda *_: None)
    monkeypatch.setattr(EngineControl, "state", lambda *_: EngineState(str(VERSION), False, None, 1, 1))
    monkeypatch.setattr(EngineControl, "probe", lambda *_, **__: Probed([-0.5], [], [], []))
    store = Store(f"sqlite:///{tmp_path}/store.db")
    urls = ["http://a", "http://b"]
    store.engines.register([serving_row(n, url) for n, url in enumerate(urls)])
    nothing: Any = SimpleNamespace(stopping=False)
    context = RunContext(Config(store=StoreConfig(poll_s=0.001)), tmp_path, 1, 0)
    check = ColdCheck(context, store, nothing, nothing, nothing, nothing, nothing, nothing)
    looks, seen = 0, []
    for _ in check._compared(ProbeText([1, 2], [-0.5], 1.0), VERSION):
        engine, looks = store.engines.own()[0], looks + 1
        if not engine.is_done:
            state = ABSENT if engine.turn is EngineTurn.AWAY else STARTING
            store.engines.note([replace(engine, state=state, done_turn=engine.turn_order)])
        elif engine.state is STARTING and looks > 20:
            store.engines.note([replace(engine, state=SERVING)])
        seen.append(store.engines.own()[0].state)
    assert ABSENT in seen and STARTING in seen
    assert OwnEngines(store, "k", together=False).urls(begun=True) == urls
    store.close()
