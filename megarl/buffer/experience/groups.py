"""Facts of a whole group, from the rewards and statuses of its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.core.schema import GroupStats, RewardStatus


def group_stats(rewards: Sequence[float]) -> GroupStats:
    """Mean and unbiased standard deviation in float64, the same for every order of ``rewards``.

    An all-equal group has std exactly 0 and its reward as mean: a rounding residue divided by std + 1e-6 would become a
    signal. A group of one has std 0.

    Raises:
        ValueError: the group is empty, a reward is not finite, or the variance overflows.
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


def is_zero_variance(statuses: Sequence[RewardStatus]) -> bool:
    """Return True if a group's accuracy is 0 or 1; dynamic sampling then replaces the group before training.

    Scores are not compared, because length and format shaping vary them in all-right or all-wrong groups. Missing
    verdicts (error, timeout) count as not right.
    """
    right = sum(status == "ok" for status in statuses)
    return right in (0, len(statuses))
