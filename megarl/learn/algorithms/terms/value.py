"""The critic's loss (PPO, 1707.06347): ½·max((V − R)², (clip(V, V_old − c, V_old + c) − R)²), the mean over tokens.

R: the returns of GAE, V_old: values at the start of the step, c: ``value_clip`` (null: ½(V − R)²). Computed in float64.
"""

from __future__ import annotations

import torch

from megarl.config.algorithms import PPOConfig
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms.reduction import Tokens
from megarl.learn.algorithms.types import Loss


def count(mask: torch.Tensor) -> torch.Tensor:
    """Return this micro-batch's share of the global denominator: its kept tokens, int64 scalar."""
    return mask.sum()


def loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    config: PPOConfig,
    mask: torch.Tensor | None = None,
) -> Loss:
    """Return the sum over the tokens of a micro-batch.

    Args:
        values: float [T], with gradient; ``old_values`` and ``returns`` [T] get none.
        mask: bool [T], None for all; masked values are ignored, even NaN.
    """
    keep = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    v, old, target = (terms.masked(x.double(), keep) for x in (values, old_values.detach(), returns.detach()))
    each = (v - target).square()
    clipped = torch.zeros_like(keep)
    if config.value_clip is not None:
        bounded = (torch.clamp(v, old - config.value_clip, old + config.value_clip) - target).square()
        clipped, each = bounded > each, torch.maximum(each, bounded)
    total, tokens = 0.5 * each.sum(), keep.sum()
    metrics = {
        "critic/vf_loss": (total.detach(), tokens),
        "critic/vf_clipfrac": (clipped.sum(), tokens),
        "critic/vpred_mean": (v.detach().sum(), tokens),
    }
    return Loss(total.to(values.dtype), metrics)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, kept: Tokens) -> float:
    """Return 1 − Var(R − V) / Var(R) over the kept tokens of a step ([T] each), in float64: 1 for a perfect critic, 0
    for a constant one, below 0 for a worse one. 0 if all returns are equal or there are none."""
    total = kept.totals(torch.Tensor.double, returns)
    if total.number < 2 or total.max == total.min:
        return 0.0

    def rest(r: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return r.double() - v.double()

    unexplained = kept.variance(kept.totals(rest, returns, values).mean, rest, returns, values)
    return 1.0 - unexplained / kept.variance(total.mean, torch.Tensor.double, returns)
