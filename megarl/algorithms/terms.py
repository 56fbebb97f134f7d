"""The terms that losses are made of: per-token formulas, and how tokens are added up.

Shape legend: T tokens of a micro-batch, flat. Every function is elementwise over [T] unless it says otherwise.
"""

from __future__ import annotations

import torch

from megarl.config.schema import AlgorithmConfig
from megarl.errors import ConfigError


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``x`` with 0 where ``mask`` is False: done before any formula, so that NaN there reaches no gradient."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def ppo_clip(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(−Aρ, −A·clip(ρ, 1−clip_low, 1+clip_high)) (PPO, 1707.06347; clip-higher: DAPO, 2503.14476).

    With ``dual_clip`` = c > 1, where A < 0: min(that, −c·A) (1912.09729).

    Returns:
        (loss, clipped): ``clipped`` is bool, True where the clipped branch is the larger one.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        if not dual_clip > 1.0:
            raise ConfigError(f"algorithm.dual_clip must be above 1, got {dual_clip}; set it to 3, or null for none")
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, clipped > unclipped


def kl(logp: torch.Tensor, ref_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(policy ‖ reference) at a sampled token (Schulman 2020, "Approximating KL divergence").

    k2 = ½(logp − ref)²;  k3 = exp(ref − logp) − (ref − logp) − 1. k1 = logp − ref is refused: as a loss its expected
    gradient is 0 whatever the reference.
    """
    difference = ref_logp - logp
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # expm1 keeps k3 >= 0 and exact near 0, where exp(x) - x - 1 cancels.
        return torch.expm1(difference) - difference
    raise ConfigError(f"algorithm.kl.estimator must be k2 or k3 in the loss, got {estimator!r}")


def rows_with_tokens(mask: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 [num_rows]: kept tokens of each row."""
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=mask.device)
    return lengths.index_add_(0, row, mask.long())


def denominator(mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: AlgorithmConfig) -> torch.Tensor:
    """This micro-batch's share of the global denominator, int64 scalar: kept tokens for ``token_mean``, else rows that
    have a kept token."""
    if config.aggregation == "token_mean":
        return mask.sum()
    return (rows_with_tokens(mask, row, num_rows) > 0).sum()


def token_weights(
    mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: AlgorithmConfig, *, dtype: torch.dtype
) -> torch.Tensor:
    """[T] weights such that Σ weight·x, over all micro-batches and ranks, divided by the global :func:`denominator`
    is the aggregation; 0 where masked.

    token_mean Σx / tokens; seq_mean_token_sum Σx / rows; seq_mean_token_mean Σ_rows mean(x) / rows;
    seq_mean_token_sum_norm Σx / (rows · aggregation_length) (with ``normalize_by_std=false``: Dr.GRPO, 2503.20783).
    """
    kept = mask.to(dtype)
    match config.aggregation:
        case "token_mean" | "seq_mean_token_sum":
            return kept
        case "seq_mean_token_mean":
            return kept / rows_with_tokens(mask, row, num_rows).clamp(min=1)[row].to(dtype)
        case "seq_mean_token_sum_norm":
            if config.aggregation_length < 1:
                raise ConfigError(f"algorithm.aggregation_length must be at least 1, got {config.aggregation_length}")
            return kept / config.aggregation_length
    raise ConfigError(
        f"algorithm.aggregation must be token_mean, seq_mean_token_mean, seq_mean_token_sum or "
        f"seq_mean_token_sum_norm, got {config.aggregation!r}"
    )
