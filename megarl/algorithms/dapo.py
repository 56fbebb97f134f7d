"""Helpers of DAPO (2503.14476) beside its loss: zero-variance groups are replaced, overlong answers lose reward."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.schema import RewardStatus


def is_zero_variance(statuses: Sequence[RewardStatus]) -> bool:
    """Return True if a group's accuracy is 0 or 1 (dynamic sampling: it is then replaced before training).

    The accuracy, not the score: length and format shaping vary scores among answers that are all right or all wrong.
    Verdicts that are missing (error, timeout) count as not right.
    """
    right = sum(status == "ok" for status in statuses)
    return right in (0, len(statuses))


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """Penalty added to the reward of a response of ``length`` tokens: never above 0 (equation 13).

    0 up to ``limit − buffer``, from there linearly down to ``−penalty`` at ``limit``, and ``−penalty`` beyond.

    Args:
        limit: ``rollout.max_response_tokens``.
        buffer: ``reward.overlong_buffer``, 1 .. limit.
    """
    assert 1 <= buffer <= limit, f"reward.overlong_buffer={buffer} must be within 1 .. {limit}"
    over = min(max(0, length - (limit - buffer)), buffer)
    return -penalty * over / buffer if over else 0.0
