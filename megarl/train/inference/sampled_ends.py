"""Ends of sampled responses against their probabilities, and the type in which the head computes.

Whatever the model is, an end token is sampled at a place with its probability there. If responses are trained because
they are short, ends happen more often than that.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.learn.models.teaching import Columns, HeadInput, MoreColumns


def drops_by_length(config: Config) -> bool:
    """Return True where settings choose groups or responses by when they end, or by what they get."""
    is_first = config.sync.order == "completion" and config.sync.max_staleness > 0
    return is_first or config.algorithm.dynamic_sampling or config.rollout.spare > 0 or bool(config.buffer.operators)


def early_ends(
    sampled: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor, ends: torch.Tensor
) -> list[tuple[bool, float]]:
    """Return (the token is an end token, at most the probability of that) of each sampled token.

    Args:
        sampled: int64 [n].
        ids: int64 [n, k], likeliest first.
        probabilities: float64 [n, k].
        ends: int64 [e], ids of the end tokens.
    """
    known = torch.isin(ids, ends)
    unknown = (len(ends) - known.sum(1)).clamp(min=0) * probabilities[:, -1]
    odds = (probabilities * known).sum(1) + unknown
    return list(zip(torch.isin(sampled, ends).tolist(), odds.clamp(max=1.0).tolist(), strict=True))


class WatchedHead:
    """Passes columns on, and remembers the type of what the head multiplies."""

    def __init__(self, columns: MoreColumns) -> None:
        self._columns, self.width = columns, columns.width
        self._types = set[torch.dtype]()

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of positions ``index`` [n]."""
        inner = self._columns.at(index)

        def columns(given: HeadInput) -> torch.Tensor:
            self._types |= {given.hidden.dtype, given.weight.dtype}
            return inner(given)

        return columns

    def other_than(self, dtype: torch.dtype) -> float:
        """Return 1.0 if a rank's head has used another type, else 0.0. Every rank calls it."""
        other = torch.tensor(float(bool(self._types - {dtype})))
        dist.all_reduce(other, dist.ReduceOp.MAX)
        return float(other)
