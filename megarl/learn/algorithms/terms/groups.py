"""Reward of a response relative to its group."""

from __future__ import annotations

from megarl.core.schema import GroupStats


def centred(reward: float, stats: GroupStats) -> float:
    """Return r − mean in float64; exactly 0 in an all-equal group; r in a group of one, which has no baseline."""
    return reward if stats.size == 1 else reward - stats.mean
