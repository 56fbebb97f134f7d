"""Arrays that are not read yet: their shape without their memory, and the bounds of their values.

The batch of a step is planned from lengths and rewards of all its trajectories. Arrays are read only by the nodes that
train on them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def absent(dtype: str, *shape: int) -> np.ndarray:
    """Make a read-only array of this shape that takes no memory; every value is -1."""
    return np.broadcast_to(np.array(-1, dtype), shape)


class TokenBounds(NamedTuple):
    """Bounds of the values in a turn's arrays, from which a turn is checked without its arrays."""

    smallest: int
    """Smallest token id."""
    largest: int
    """Largest token id."""
    at: int = -1
    """Token with the first non-finite log-prob, else with the largest; -1 without log-probs."""
    logp: str = ""
    """The log-prob of token ``at`` as text, because JSON has no NaN."""

    @classmethod
    def of(cls, token_ids: np.ndarray, logp: np.ndarray | None) -> TokenBounds | None:
        """Compute the bounds of a turn's arrays; None for a turn without tokens."""
        if not len(token_ids):
            return None
        ids = int(token_ids.min()), int(token_ids.max())
        if logp is None or not len(logp):
            return cls(*ids)
        finite = np.isfinite(logp)
        at = int(np.argmax(logp) if finite.all() else np.argmin(finite))
        return cls(*ids, at, str(logp[at]))
