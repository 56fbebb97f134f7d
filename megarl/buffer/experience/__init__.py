"""Rewards of whole groups, operators on groups, and metrics of a step's answers."""

from megarl.buffer.experience.pipeline import (
    Report,
    Verified,
    add_model_scores,
    by_group,
    part_metrics,
    shuffle_rewards,
    split_by_accuracy,
    verifier_metrics,
    verify,
    with_group_stats,
)

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
