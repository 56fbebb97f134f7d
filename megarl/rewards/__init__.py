"""Verifiers, and the pool of processes that they run in."""

from megarl.rewards.pool.pool import RewardPool, Verdict
from megarl.rewards.router import compute_score

__all__ = ["RewardPool", "Verdict", "compute_score"]
