"""Terms that algorithms share. This module: weighted sums of tokens for losses.

Shape legend: T tokens of a micro-batch, flat.
"""

from __future__ import annotations

from typing import Literal

import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with 0 where ``mask`` is False; use it before any formula, so that NaN there reaches no gradient."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def rows_with_tokens(mask: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return int64 [num_rows]: number of kept tokens of each row."""
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=mask.device)
    return lengths.index_add_(0, row, mask.long())


def denominator(mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: AlgorithmConfig) -> torch.Tensor:
    """Return this micro-batch's share of the global denominator, int64 scalar: kept tokens for ``token_mean``, else
    rows with a kept token."""
    if config.aggregation == "token_mean":
        return mask.sum()
    return (rows_with_tokens(mask, row, num_rows) > 0).sum()


def counted(mask: torch.Tensor, row: torch.Tensor, config: AlgorithmConfig, first: torch.Tensor | None) -> torch.Tensor:
    """Return bool [T]: the mask for :func:`denominator`. Unless that counts tokens, the mask keeps only the ``first``
    row of each trajectory (``LossInput.first``), so that rows are trajectories."""
    return mask if first is None or config.aggregation == "token_mean" else mask & first[row]


def weighting(config: AlgorithmConfig) -> tuple[Literal["sum", "seq_mean"], float]:
    """Return (reduction of a row's tokens, factor of every token). The sum over all micro-batches and ranks, divided by
    the global :func:`denominator`, is then the aggregation.

    token_mean Σx / tokens; seq_mean_token_sum Σx / rows; seq_mean_token_mean Σ_rows mean(x) / rows;
    seq_mean_token_sum_norm Σx / (rows · aggregation_length) (with ``normalize_by_std=false``: Dr.GRPO, 2503.20783).
    A trajectory with several rows counts as one: its mean(x) is Σ_rows share·mean(x) (``LossInput.share``).
    """
    match config.aggregation:
        case "token_mean" | "seq_mean_token_sum":
            return "sum", 1.0
        case "seq_mean_token_mean":
            return "seq_mean", 1.0
        case "seq_mean_token_sum_norm":
            if config.aggregation_length < 1:
                raise ConfigError(f"algorithm.aggregation_length must be at least 1, got {config.aggregation_length}")
            return "sum", 1.0 / config.aggregation_length
    raise ConfigError(
        f"algorithm.aggregation must be token_mean, seq_mean_token_mean, seq_mean_token_sum or "
        f"seq_mean_token_sum_norm, got {config.aggregation!r}"
    )


def token_weights(
    mask: torch.Tensor,
    row: torch.Tensor,
    num_rows: int,
    config: AlgorithmConfig,
    *,
    share: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [T] weights of :func:`weighting`; 0 where masked. ``share``: ``LossInput.share``."""
    within_row, scale = weighting(config)
    kept = mask.to(dtype) * scale
    if within_row == "sum":
        return kept
    weights = kept / rows_with_tokens(mask, row, num_rows).clamp(min=1)[row].to(dtype)
    return weights if share is None else weights * share[row].to(dtype)
