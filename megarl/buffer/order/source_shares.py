"""Shares of task sources: each source gets its share of every step, for any weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megarl.core.errors import ConfigError

MAX_PARTS = 100_000
"""Largest sum of the sources' weights as whole numbers."""


class Shares:
    """Smooth weighted round robin over endless slots, one for each task of a run, in order.

    Among any P slots in a row, P the sum of the weights as smallest whole numbers, a source of weight w has w. So a
    step's number determines its sources and its position in each.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        parts = whole_parts(weights)
        self._order = np.array(_round_robin(parts), dtype=np.int64)
        taken = np.eye(len(parts), dtype=np.int64)[self._order].cumsum(axis=0)
        self._before = np.concatenate([np.zeros((1, len(parts)), np.int64), taken])

    def before(self, slot: int) -> list[int]:
        """Return the tasks of each source in all slots before ``slot``."""
        rounds, rest = divmod(slot, len(self._order))
        found: list[int] = (rounds * self._before[-1] + self._before[rest]).tolist()
        return found

    def of(self, start: int, count: int) -> list[int]:
        """Return the source number of each of ``count`` slots from ``start``."""
        found: list[int] = self._order[np.arange(start, start + count) % len(self._order)].tolist()
        return found

    def most(self, count: int) -> list[int]:
        """Return the most tasks of each source in any ``count`` consecutive slots."""
        period = len(self._order)
        rounds, rest = divmod(count, period)
        twice = np.concatenate([self._before, self._before[1:] + self._before[-1]])
        windows = twice[rest : rest + period] - twice[:period]
        found: list[int] = (rounds * self._before[-1] + windows.max(axis=0)).tolist()
        return found


def whole_parts(weights: Sequence[float]) -> list[int]:
    """Return the weights as smallest whole numbers, from their exact decimals: 0.5, 0.25 -> 2, 1.

    Raises:
        ConfigError: their sum exceeds ``MAX_PARTS``.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * common) for weight in exact]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) > MAX_PARTS:
        raise ConfigError(
            f"taskset.train: the weights {', '.join(f'{weight:g}' for weight in weights)} make {sum(parts)} parts, at "
            f"most {MAX_PARTS} are counted; give rounder numbers"
        )
    return parts


def _round_robin(parts: Sequence[int]) -> list[int]:
    """Return the sources of one round: each slot goes to the source with the largest deficit, the first on a tie."""
    lack, total = [0] * len(parts), sum(parts)
    order = []
    for _ in range(total):
        lack = [a + part for a, part in zip(lack, parts, strict=True)]
        chosen = max(range(len(parts)), key=lambda source: lack[source])
        lack[chosen] -= total
        order.append(chosen)
    return order
