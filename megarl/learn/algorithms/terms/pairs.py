"""Losses of pairs: rows 2i and 2i+1 of a micro-batch are the chosen and the rejected response of pair i.

A pair counts in the loss only if both responses have a token in it; this excludes rows that pad a micro-batch.
"""

from __future__ import annotations

import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.learn.algorithms import terms

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def whole(mask: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return bool [num_rows / 2]: True for pairs in which both responses have a kept token."""
    assert num_rows % 2 == 0, f"a micro-batch of pairs has an even number of rows, got {num_rows}"
    return (terms.rows_with_tokens(mask, row, num_rows) > 0).view(-1, 2).all(1)


def count(mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: AlgorithmConfig) -> torch.Tensor:
    """Return this micro-batch's share of the global denominator: its whole pairs, int64 scalar."""
    return whole(mask, row, num_rows).sum()


def sums(x: torch.Tensor, mask: torch.Tensor, row: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (chosen, rejected) float64 [num_rows / 2]: sums over the kept tokens of each response."""
    by_row = torch.zeros(num_rows, dtype=torch.float64, device=x.device)
    return split(by_row.index_add(0, row, terms.masked(x.double(), mask)))


def split(by_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (chosen, rejected) [num_rows / 2], from one value per row."""
    chosen, rejected = by_row.view(-1, 2).unbind(1)
    return chosen, rejected


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor, counted: torch.Tensor) -> Metrics:
    """Return TRL's metrics over ``counted`` pairs: how often, and by how much, the chosen response's reward is larger.

    Equal rewards count as half (in TRL as 0), so that an untrained model has an accuracy of one half.
    """
    chosen, rejected = chosen.detach()[counted], rejected.detach()[counted]
    number = counted.sum()
    return {
        "rewards/chosen": (chosen.sum(), number),
        "rewards/rejected": (rejected.sum(), number),
        "rewards/accuracies": ((chosen > rejected).sum() + (chosen == rejected).sum() / 2, number),
        "rewards/margins": ((chosen - rejected).sum(), number),
    }
