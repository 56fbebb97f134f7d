"""Cold check: what counts as a difference, and the engine that it starts again serves when the check ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.config.job import StoreConfig
from megarl.core.errors import WeightsDiffer
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl
from megarl.engines.client.probe import Probed, ProbeText
from megarl.engines.fleet import EngineStatus, EngineTurn
from megarl.train.parts.cold import ColdCheck, compare
from megarl.train.ranks import RunContext
from megarl.train.sync.look import EngineLook
from tests.engine_rows import serving_row

SERVING, STARTING, ABSENT = EngineStatus.SERVING, EngineStatus.STARTING, EngineStatus.ABSENT
VERSION = WeightsVersion(1, 3)


def test_both_engines_are_joined_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor notes that one serves a while after its server answers."""
    monkeypatch.setattr(EngineControl, "probe", lambda *_, **__: Probed([-0.5], [], [], []))
    store = Store(f"sqlite:///{tmp_path}/store.db")
    urls = ["http://a", "http://b"]
    store.engines.register([serving_row(n, url, version=VERSION) for n, url in enumerate(urls)])
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
            store.engines.note([replace(engine, state=SERVING, start=9)])
        seen.append(store.engines.own()[0].state)
    assert ABSENT in seen and STARTING in seen
    assert [row.url for row in EngineLook(store, "k", own=True).to_join() or ()] == urls
    store.close()


def test_a_cold_engine_has_the_same_bits_or_those_within_a_tolerance() -> None:
    warm = Probed([-1.0, -2.0], [-0.5], [-0.5], [7])
    compare(warm, warm, "u", None)
    near = warm._replace(decode=[-0.5000001])
    compare(warm, near, "u", 1e-4)
    with pytest.raises(
        WeightsDiffer, match=r"at u, .*of decode are 1\.00e-07 .*first at token 1 \(-0\.5 and -0\.5000001\)"
    ):
        compare(warm, near, "u", None)
    with pytest.raises(WeightsDiffer, match=r"of prefill .*first at token 2"):
        compare(warm, warm._replace(prefill=[-1.0, -2.1]), "u", 1e-4)


def test_after_another_token_nothing_is_compared_within_a_tolerance() -> None:
    warm = Probed([-1.0], [-0.5, -0.6, -0.7], [-0.5, -0.6, -0.7], [5, 6, 7])
    other = Probed([-1.0], [-0.5, -3.0, -4.0], [-0.5, -3.0, -4.0], [5, 9, 8])
    compare(warm, other, "u", 1e-4)
    with pytest.raises(WeightsDiffer, match=r"of decode .*first at token 2"):
        compare(warm, other, "u", None)
    with pytest.raises(WeightsDiffer, match=r"of decode .*first at token 1"):
        compare(warm, other._replace(decode=[-0.6, -3.0, -4.0]), "u", 1e-4)
