"""Raw experiences to verified ones."""

from megarl.experience.operators import Report, Verified, shuffle_rewards, verify

__all__ = ["Report", "Verified", "shuffle_rewards", "verify"]
