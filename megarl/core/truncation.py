"""Warn about responses truncated at the length limit, in the job's log, terminal and report."""

from __future__ import annotations

from collections.abc import Mapping

METRIC = "response_length/clip_ratio"
"""Share of a step's responses that were truncated."""
MANY = 0.25
"""Minimum share of truncated responses for a warning: the limit, not the policy, then decides what is learned."""


class TruncationWarning:
    """Warns once per start of a job."""

    def __init__(self, limit: int) -> None:
        self._limit, self._warned = limit, False

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning for a step with many truncated responses; ``None`` otherwise, and after the first one."""
        if self._warned or (text := truncation(metrics, self._limit)) is None:
            return None
        self._warned = True
        return text


def truncation(metrics: Mapping[str, float], limit: int) -> str | None:
    """Return a warning if many responses of a step were truncated at ``limit`` tokens, else ``None``."""
    if (share := metrics.get(METRIC, 0.0)) < MANY:
        return None
    return (
        f"{share:.0%} of the responses were truncated at rollout.max_response_tokens={limit}, before an answer could "
        "be complete; raise it, and rollout.max_trajectory_tokens where that is set"
    )
