"""Statistics of a group of rewards: the only thing about its group that a sample needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.schema import GroupStats


def centred(reward: float, stats: GroupStats) -> float:
    """r − mean, in float64; exactly 0 in an all-equal group; r in a group of one, where the mean would say nothing."""
    return reward if stats.size == 1 else reward - stats.mean


def group_stats(rewards: Sequence[float]) -> GroupStats:
    """Mean and unbiased standard deviation in float64, the same for every order of ``rewards``.

    An all-equal group has std exactly 0 and that very value as its mean, where rounding would leave a residue that a
    division by std + 1e-6 turns into a signal. A group of one has std 0.

    Raises:
        ValueError: for an empty group, a reward that is not finite, or rewards whose variance overflows.
    """
    values = [float(r) for r in rewards]
    if not values:
        raise ValueError("group_stats needs at least one reward, got none")
    if not all(math.isfinite(v) for v in values):
        raise ValueError(f"group_stats needs finite rewards, got {values}")
    if len(set(values)) == 1:
        return GroupStats(mean=values[0], std=0.0, size=len(values))
    try:
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    except OverflowError as error:
        raise ValueError(f"group_stats needs rewards whose variance is finite in float64, got {values}") from error
    return GroupStats(mean=mean, std=math.sqrt(variance), size=len(values))
