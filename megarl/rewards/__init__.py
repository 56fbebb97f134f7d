"""Verifiers and reward models by rule, judge or program, and the pool of verifier processes.

Code here imports ``core``, ``sandbox`` and its own section of ``config``. It gets a response and a row, and returns a
score; it never executes either of them outside of the sandbox.
"""

from megarl.rewards.pool.pool import RewardPool, Verdict
from megarl.rewards.routes import compute_score

__all__ = ["RewardPool", "Verdict", "compute_score"]

FACE = (
    "again",
    "code",
    "judge.family",
    "judge.judge",
    "pool.child",
    "pool.host",
    "pool.pool",
    "pool.process",
    "pool.tally",
    "routes",
    "school.verifier",
    "teacher_server",
    "verdict",
    "wrong_answers",
)
"""Modules that other packages may import."""
