"""Divergence from teachers' distributions as a term of a loss: Σ_t w_t·u·D_t, w_t by ``aggregation``, u the weight of
the row's teacher."""

from __future__ import annotations

import torch

from megarl.config.algorithms import DivergenceConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.types import LossInput

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def divergence(
    batch: LossInput, config: DivergenceConfig, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, Metrics]:
    """Return the term of the file's head, float64 with gradient, and its metrics.

    Args:
        factors: [T], a further factor of each token; None for 1.

    Raises:
        ConfigError: the batch has no divergence.
    """
    if batch.divergence is None or batch.teacher_weights is None:
        raise ConfigError(f"algorithm.divergence={config.divergence} needs the divergence from a teacher in LossInput")
    row, kept = batch.row, batch.mask & (batch.teacher_weights > 0)[batch.row]
    if batch.taught is not None:
        kept = kept & batch.taught
    weights = terms.token_weights(batch.mask, row, batch.num_rows, config, share=batch.share, dtype=torch.float64)
    weights = weights * batch.teacher_weights[row]
    if factors is not None:
        weights = weights * terms.masked(factors.double(), batch.mask)
    each = terms.masked(batch.divergence.double(), kept)
    return (weights * each).sum(), {"teacher/divergence": (each.detach().sum(), kept.sum())}
