"""Rewards of whole groups, operators on groups, and metrics of a step's answers."""

from megarl.buffer.experience.pipeline import (
    Report,
    Verified,
    add_model_scores,
    by_group,
    shuffle_rewards,
    split_by_accuracy,
    verify,
    with_group_stats,
)
from megarl.buffer.experience.reward_metrics import part_metrics, verifier_metrics

__all__ = [
    "Report",
    "Verified",
    "add_model_scores",
    "by_group",
    "part_metrics",
    "shuffle_rewards",
    "split_by_accuracy",
    "verifier_metrics",
    "verify",
    "with_group_stats",
]
