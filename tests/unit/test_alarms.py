"""Rules of alarms over a step's metrics."""

from __future__ import annotations

from typing import cast

from megarl.config import Config
from megarl.train.parts.alarms import RULES


def test_an_optimizer_that_counts_other_steps_is_named() -> None:
    [rule] = [rule for rule in RULES if rule.name == "optimizer-steps"]
    before = {"actor/optimizer_steps": 8.0, "training/rollbacks": 0.0}
    now = {"actor/optimizer_steps": 10.0, "actor/updates": 2.0, "training/rollbacks": 0.0}
    config = cast(Config, None)
    assert rule.test(config, [before], now) is None
    assert rule.test(config, [], now) is None
    assert rule.test(config, [before], {**now, "actor/optimizer_steps": 3.0}) is not None
    assert rule.test(config, [before], {**now, "actor/optimizer_steps": 3.0, "training/rollbacks": 1.0}) is None
