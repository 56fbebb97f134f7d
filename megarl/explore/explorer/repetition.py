"""Repetition at the end of a response, by its tokens. Such a response is ended before its limit.

Source: Kimi k1.5 (arXiv:2501.12599, section 2.6.2), which ends repeated sequences early.
"""

from __future__ import annotations

import numpy as np

LONGEST_PERIOD = 256
"""Longest repeated sequence that is detected, in tokens."""


def repeats_at_end(token_ids: np.ndarray, times: int) -> bool:
    """Return True if the last tokens are one sequence ``times`` times in a row.

    Args:
        token_ids: int [T].
        times: 2 or more.
    """
    longest = min(len(token_ids) // times, LONGEST_PERIOD)
    if not longest:
        return False
    # A period is a distance to an earlier occurrence of the last token.
    candidates = np.flatnonzero(token_ids[-1 - longest : -1][::-1] == token_ids[-1]) + 1
    return any(_has_period(token_ids[-period * times :], period) for period in candidates.tolist())


def _has_period(token_ids: np.ndarray, period: int) -> bool:
    return np.array_equal(token_ids[period:], token_ids[:-period])
