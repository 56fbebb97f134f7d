"""Loss of sampled tokens, its metrics, and the off-policy correction between sampling engine and trainer.

Loss: Σ_t w_t·(v_t·surrogate_t + kl.coef·KL_t − entropy_coef·H_t), w_t by ``aggregation`` (``reduction.py``), v_t by
``correction``, KL and entropy by ``ops/policy.py``.

Correction v_t, with r_t = exp(old_logp_t − engine_logp_t), C = ``correction_cap``:
truncate: min(r, C), truncated importance sampling
mask: r, and 0 outside [1/C, C]; such tokens stay in the denominator and keep their KL and entropy terms
"""

from __future__ import annotations

from typing import Literal

import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.types import Loss, LossInput
from megarl.ops import PolicyLoss, policy_loss
from megarl.ops.policy import K3_MOST, kl_estimates

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


def clipped(
    name: str, batch: LossInput, config: AlgorithmConfig, *, objective: Literal["ppo_clip", "cispo"] = "ppo_clip"
) -> Loss:
    """Return the loss with a surrogate of ``policy_loss``, ratios by ``importance``. ``ref_logp`` may be None if
    ``kl.coef`` is 0, ``entropy`` if ``entropy_coef`` is 0. ``name``: the algorithm's, for messages."""
    old_logp, advantages = needed(name, batch)
    weight, metrics = correction(batch, config)
    result = _policy(batch, config, old_logp, advantages, weight, objective, config.dual_clip)
    sums, count = result.sums, _count(batch, config)
    metrics |= {"actor/pg_loss": (sums.pg, count), "actor/pg_clipfrac": (sums.clipped, sums.tokens)}
    if config.dual_clip is not None:
        metrics["actor/pg_clipfrac_lower"] = (sums.dual_clipped, sums.tokens)
    return Loss(result.total, metrics | _shared_metrics(batch, config, result, count))


def unclipped(name: str, batch: LossInput, config: AlgorithmConfig, surrogate: torch.Tensor) -> Loss:
    """Return the loss with a custom ``surrogate`` [T] in float64, computed from masked inputs, with v_t included."""
    old_logp, _ = needed(name, batch)
    if config.dual_clip is not None:
        raise ConfigError(f"algorithm.dual_clip={config.dual_clip}: {name} clips nothing; set it to null")
    weights = terms.token_weights(batch.mask, batch.row, batch.num_rows, config, share=batch.share, dtype=torch.float64)
    pg = (weights * surrogate).sum()
    # Advantages of 0 remove the surrogate: the KL and entropy terms remain, and the metrics.
    result = _policy(batch, config, old_logp, torch.zeros_like(old_logp), None, "cispo", None)
    count = _count(batch, config)
    metrics = {"actor/pg_loss": (pg.detach(), count)} | _shared_metrics(batch, config, result, count)
    return Loss(result.total + pg.to(result.total.dtype), metrics)


def needed(name: str, batch: LossInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (old_logp, advantages) of the batch; raise ConfigError if one is missing."""
    if batch.old_logp is None or batch.advantages is None:
        raise ConfigError(f"{name} needs old_logp and advantages for its loss; the trainer must compute them first")
    return batch.old_logp, batch.advantages


def _count(batch: LossInput, config: AlgorithmConfig) -> torch.Tensor:
    mask = terms.counted(batch.mask, batch.row, config, batch.first)
    return terms.denominator(mask, batch.row, batch.num_rows, config)


def _policy(
    batch: LossInput,
    config: AlgorithmConfig,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    weight: torch.Tensor | None,
    objective: Literal["ppo_clip", "cispo"],
    dual_clip: float | None,
) -> PolicyLoss:
    kl = config.kl
    if kl.place == "loss" and kl.estimator not in ("k2", "k3"):
        # As a loss, k1 has an expected gradient of 0 for any reference.
        raise ConfigError(
            f"algorithm.kl.estimator must be k2 or k3 in the loss, got {kl.estimator!r}; k1 is for "
            "algorithm.kl.place=reward"
        )
    if kl.place == "loss" and batch.ref_logp is None and kl.coef != 0.0:
        raise ConfigError(
            f"algorithm.kl.coef is {kl.coef} but there is no ref_logp; compute it or set the coefficient to 0"
        )
    if batch.entropy is None and config.entropy_coef != 0.0:
        raise ConfigError(
            f"algorithm.entropy_coef is {config.entropy_coef} but there is no entropy; compute it or set it to 0"
        )
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(f"algorithm.dual_clip must be above 1, got {dual_clip}; set it to 3, or null for none")
    within_row, scale = terms.weighting(config)
    return policy_loss(
        batch.logp,
        old_logp,
        advantages,
        batch.cu_seqlens,
        mask=batch.mask,
        entropy=batch.entropy,
        ref_logp=batch.ref_logp,
        is_weight=weight,
        importance=config.importance,
        objective=objective,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=dual_clip,
        # With the KL in the rewards, it is only a metric here.
        kl=None if batch.ref_logp is None else kl.estimator,
        kl_coef=kl.coef if kl.place == "loss" and batch.ref_logp is not None else 0.0,
        entropy_coef=config.entropy_coef,
        aggregation=within_row,
        row_weight=batch.share if within_row == "seq_mean" else None,
        scale=scale,
    )


def _shared_metrics(
    batch: LossInput, config: AlgorithmConfig, result: PolicyLoss, count: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    sums = result.sums
    metrics = {"actor/ppo_kl": (sums.old_minus_new, sums.tokens)}
    if batch.ref_logp is not None:
        metrics["actor/kl_loss"] = (sums.kl, count)
        if config.kl.estimator == "k3":
            d = batch.ref_logp.double() - batch.logp.detach().double()
            clamped = batch.mask & (kl_estimates(d, "k3") >= K3_MOST)
            metrics["actor/kl_clampfrac"] = (clamped.sum().double(), sums.tokens)
    if batch.entropy is not None:
        metrics["actor/entropy"] = (sums.entropy, count)
    return metrics
