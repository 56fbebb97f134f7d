"""Verifiers, and the pool of processes that they run in."""

from megarl.explore.rewards.pool.pool import RewardPool, Verdict
from megarl.explore.rewards.router import compute_score

__all__ = ["RewardPool", "Verdict", "compute_score"]
