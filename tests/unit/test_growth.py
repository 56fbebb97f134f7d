"""Memory that grows again and again is told, with what grew; what grows once is no leak."""

from __future__ import annotations

from megarl.learn.memory.phases import Phase
from megarl.train.memory import LEAST_GROWTH_BYTES, Growth

MIB = 2**20


def test_what_grew_is_named() -> None:
    growth, there = Growth(), {"actor.parameters": 1000 * MIB, "actor.optimizer": 0}
    assert growth.look(Phase.UPDATE, 1200 * MIB, there) is None
    there = there | {"actor.optimizer": 2000 * MIB}  # moments are made in the first update
    assert growth.look(Phase.UPDATE, 3200 * MIB, there) is None
    assert growth.look(Phase.UPDATE, 3200 * MIB + LEAST_GROWTH_BYTES, there) is None  # a tenth is more
    said = growth.look(Phase.UPDATE, 4200 * MIB, there)
    assert said == "memory in phase update has grown by 0.98 GiB to 4.10 GiB: not a model: their bytes are the same"
    assert growth.look(Phase.UPDATE, 4200 * MIB, there) is None
    said = growth.look(Phase.UPDATE, 5200 * MIB, there | {"actor.optimizer": 3000 * MIB})
    assert said is not None and said.endswith(": actor.optimizer by 0.98 GiB")


def test_phases_are_apart() -> None:
    growth = Growth()
    for size in (1, 300):
        for phase in (Phase.SYNC, Phase.UPDATE):
            assert growth.look(phase, size * MIB, {}) is None
    assert growth.look(Phase.SYNC, 600 * MIB, {}) is not None
    assert growth.look(Phase.UPDATE, 300 * MIB, {}) is None
