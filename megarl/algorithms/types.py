"""What an algorithm is: one value made of pure functions. The trainer computes what ``needs`` lists, nothing else.

Shape legend: T tokens of a micro-batch, flat; ``row`` says which sequence each belongs to, so padded and packed
batches look the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.config.schema import AlgorithmConfig
from megarl.schema import GroupStats


@dataclass(frozen=True)
class LossInput:
    """Flat tokens of one micro-batch; what the algorithm does not need may be None."""

    logp: torch.Tensor
    """float [T], of the weights being trained, with gradient."""
    entropy: torch.Tensor | None
    """float [T], with gradient."""
    old_logp: torch.Tensor | None
    """float [T], by the trainer with the weights that the update starts from (never the engine's)."""
    ref_logp: torch.Tensor | None
    """float [T], of the reference model."""
    advantages: torch.Tensor | None
    """float [T]."""
    mask: torch.Tensor
    """bool [T]; what the other tensors hold where it is False does not matter, NaN included."""
    row: torch.Tensor
    """int64 [T], sequence number within the micro-batch, 0 .. num_rows-1, never decreasing."""
    num_rows: int

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int64 [num_rows + 1]: sequence i is tokens ``cu_seqlens[i] .. cu_seqlens[i + 1]``."""
        return torch.searchsorted(self.row, torch.arange(self.num_rows + 1, device=self.row.device))


class Loss(NamedTuple):
    """Sums, never divided: only the trainer divides, by the global count."""

    total: torch.Tensor
    """Scalar with gradient."""
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """verl's name -> (sum, count), scalars without gradient."""


@dataclass(frozen=True)
class Algorithm:
    name: str
    source: str
    """Paper."""
    roles: frozenset[str]
    """Of actor, critic, reference, reward."""
    needs: frozenset[str]
    """Of old_logp, ref_logp, advantages; ``group``: at least two answers to a task, to be compared with each other."""
    advantage: Callable[[float, GroupStats, AlgorithmConfig], float] | None
    """(reward, statistics of its whole group, settings) -> the advantage of every token of the response."""
    count: Callable[[torch.Tensor, torch.Tensor, int, AlgorithmConfig], torch.Tensor]
    """(mask [T], row [T], num_rows, settings) -> this micro-batch's share of the global denominator, scalar."""
    loss: Callable[[LossInput, AlgorithmConfig], Loss]
