"""Raw experiences to verified ones."""

from megarl.experience.operators import Report, Verified, verify

__all__ = ["Report", "Verified", "verify"]
