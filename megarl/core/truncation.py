"""Warning about responses that end at the limit of their length, for the job's log, terminal and report."""

from __future__ import annotations

from collections.abc import Mapping

METRIC = "response_length/clip_ratio"
"""Share of a step's responses that were truncated."""
MANY = 0.25
"""Share from which the limit, and not the policy, decides what is learned."""


class TruncationWarning:
    """Warns once of each start of a job."""

    def __init__(self, limit: int) -> None:
        self._limit, self._warned = limit, False

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Text about a step with many truncated responses; None for others, and after the first."""
        if self._warned or (text := truncation(metrics, self._limit)) is None:
            return None
        self._warned = True
        return text


def truncation(metrics: Mapping[str, float], limit: int) -> str | None:
    """Text about a step's metrics where many responses were truncated at ``limit`` tokens."""
    if (share := metrics.get(METRIC, 0.0)) < MANY:
        return None
    return (
        f"{share:.0%} of the responses were truncated at rollout.max_response_tokens={limit}, before an answer could "
        "be complete; raise it, and rollout.max_trajectory_tokens where that is set"
    )
