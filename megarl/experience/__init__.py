"""Raw experiences to verified ones."""

from megarl.experience.operators import (
    Report,
    Verified,
    by_group,
    shuffle_rewards,
    split_by_accuracy,
    verify,
    with_stats,
)

__all__ = ["Report", "Verified", "by_group", "shuffle_rewards", "split_by_accuracy", "verify", "with_stats"]
