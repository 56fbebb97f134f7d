"""Off-policy correction between the sampling engine and the trainer: weights of the surrogate, per token.

r_t = exp(old_logp_t − engine_logp_t), C = ``correction_cap``
truncate: min(r, C), truncated importance sampling
mask: r, and 0 outside [1/C, C]; such tokens stay in the denominator and keep their KL and entropy terms
"""

from __future__ import annotations

import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.types import LossInput

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def correction(batch: LossInput, config: AlgorithmConfig) -> tuple[torch.Tensor | None, Metrics]:
    """Return (weights [T], ``logp``'s dtype, no gradient; metrics with verl's names); (None, {}) without correction.

    ``rollout_is_mean`` is the mean of r, 1 in expectation if the policies are equal; ``weight_mean`` is the mean of the
    applied weights.
    """
    if config.correction == "none":
        return None, {}
    if batch.old_logp is None or batch.engine_logp is None:
        raise ConfigError(
            f"algorithm.correction={config.correction} needs old_logp and engine_logp; the algorithm must list "
            "old_logp in its needs"
        )
    mask, cap = batch.mask, config.correction_cap
    ratio = terms.masked((batch.old_logp.double() - batch.engine_logp.double()), mask).detach().exp()
    high, low = mask & (ratio > cap), mask & (ratio < 1.0 / cap)
    weight = ratio.clamp(max=cap) if config.correction == "truncate" else ratio.masked_fill(high | low, 0.0)
    count = mask.sum()
    metrics = {
        "rollout_corr/rollout_is_mean": ((ratio * mask).sum(), count),
        "rollout_corr/rollout_is_ratio_fraction_high": (high.sum(), count),
        "rollout_corr/rollout_is_ratio_fraction_low": (low.sum(), count),
        "rollout_corr/weight_mean": ((weight * mask).sum(), count),
    }
    if config.correction == "mask":
        metrics["rollout_corr/rollout_rs_masked_fraction"] = ((high | low).sum(), count)
    return weight.to(batch.logp.dtype), metrics
