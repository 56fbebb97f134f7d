"""GRPO (DeepSeekMath, 2402.03300; DeepSeek-R1, 2501.12948): group-relative advantages, clipped surrogate, KL.

A_i = (r_i − mean) / (std + 1e-6) over the group, the same for every token of response i; std is the unbiased one.
loss = Σ_t w_t·(ppo_clip(ρ_t, A) + kl.coef·KL_t − entropy_coef·H_t), ρ_t = exp(logp_t − old_logp_t) per token;
w_t by ``aggregation``. Dr.GRPO is ``normalize_by_std=false`` with ``aggregation=seq_mean_token_sum_norm``.
"""

from __future__ import annotations

import torch

from megarl.algorithms import terms
from megarl.algorithms.types import Algorithm, Loss, LossInput
from megarl.config.schema import AlgorithmConfig
from megarl.errors import ConfigError
from megarl.schema import GroupStats

STD_EPSILON = 1e-6


def advantage(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """A group of one has A = r. An all-equal group has A exactly 0, as ``group_stats`` then has the very reward as its
    mean. Arithmetic is float64."""
    if stats.size == 1:
        return reward
    centred = reward - stats.mean
    return centred / (stats.std + STD_EPSILON) if config.normalize_by_std else centred


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """See the file's head. ``ref_logp`` may be None when ``kl.coef`` is 0, ``entropy`` when ``entropy_coef`` is 0."""
    if batch.old_logp is None or batch.advantages is None:
        raise ConfigError("grpo needs old_logp and advantages for its loss; the trainer must compute them first")
    mask = batch.mask
    logp = terms.masked(batch.logp, mask)
    old_logp = terms.masked(batch.old_logp, mask)
    weights = terms.token_weights(mask, batch.row, batch.num_rows, config, dtype=logp.dtype)
    count = terms.denominator(mask, batch.row, batch.num_rows, config)

    surrogate, clipped = terms.ppo_clip(
        torch.exp(logp - old_logp),
        terms.masked(batch.advantages, mask),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    total = pg_loss = (weights * surrogate).sum()
    tokens = mask.sum()
    metrics = {
        "actor/pg_loss": (pg_loss.detach(), count),
        "actor/pg_clipfrac": ((clipped & mask).sum(), tokens),
        "actor/ppo_kl": ((old_logp - logp).detach().sum(), tokens),
    }
    if batch.ref_logp is not None:
        kl = (weights * terms.kl(logp, terms.masked(batch.ref_logp, mask), config.kl.estimator)).sum()
        if config.kl.coef != 0.0:
            total = total + config.kl.coef * kl
        metrics["actor/kl_loss"] = (kl.detach(), count)
    elif config.kl.coef != 0.0:
        raise ConfigError(f"algorithm.kl.coef is {config.kl.coef} but there is no ref_logp; compute it or set the coefficient to 0")
    if batch.entropy is not None:
        entropy = (weights * terms.masked(batch.entropy, mask)).sum()
        if config.entropy_coef != 0.0:
            total = total - config.entropy_coef * entropy
        metrics["actor/entropy"] = (entropy.detach(), count)
    elif config.entropy_coef != 0.0:
        raise ConfigError(f"algorithm.entropy_coef is {config.entropy_coef} but there is no entropy; compute it or set it to 0")
    return Loss(total, metrics)


GRPO = Algorithm(
    name="grpo",
    source="DeepSeekMath, arXiv 2402.03300",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "ref_logp", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
