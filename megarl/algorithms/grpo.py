"""GRPO (DeepSeekMath, 2402.03300; DeepSeek-R1, 2501.12948): group-relative advantages, clipped surrogate, KL.

A_i = (r_i − mean) / (std + 1e-6) over the group, the same for every token of response i; std is the unbiased one.
loss = Σ_t w_t·(ppo_clip(ρ_t, A) + kl.coef·KL_t − entropy_coef·H_t), ρ_t = exp(logp_t − old_logp_t) per token;
w_t by ``aggregation``; formulas, values and gradients: ``ops/policy.py``. Dr.GRPO is ``normalize_by_std=false`` with ``aggregation=seq_mean_token_sum_norm``.
"""

from __future__ import annotations

from megarl.algorithms import terms
from megarl.algorithms.types import Algorithm, Loss, LossInput
from megarl.config.schema import AlgorithmConfig
from megarl.errors import ConfigError
from megarl.ops import policy_loss
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
    kl, dual_clip = config.kl, config.dual_clip
    if kl.estimator not in ("k2", "k3"):
        # As a loss, k1 has the expected gradient 0 whatever the reference.
        raise ConfigError(f"algorithm.kl.estimator must be k2 or k3 in the loss, got {kl.estimator!r}")
    if batch.ref_logp is None and kl.coef != 0.0:
        raise ConfigError(f"algorithm.kl.coef is {kl.coef} but there is no ref_logp; compute it or set the coefficient to 0")
    if batch.entropy is None and config.entropy_coef != 0.0:
        raise ConfigError(f"algorithm.entropy_coef is {config.entropy_coef} but there is no entropy; compute it or set it to 0")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(f"algorithm.dual_clip must be above 1, got {dual_clip}; set it to 3, or null for none")
    within_row, scale = terms.weighting(config)
    total, sums = policy_loss(
        batch.logp,
        batch.old_logp,
        batch.advantages,
        batch.cu_seqlens,
        mask=batch.mask,
        entropy=batch.entropy,
        ref_logp=batch.ref_logp,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=dual_clip,
        kl=None if batch.ref_logp is None else kl.estimator,
        kl_coef=kl.coef,
        entropy_coef=config.entropy_coef,
        aggregation=within_row,
        scale=scale,
    )
    count = terms.denominator(batch.mask, batch.row, batch.num_rows, config)
    metrics = {
        "actor/pg_loss": (sums.pg, count),
        "actor/pg_clipfrac": (sums.clipped, sums.tokens),
        "actor/ppo_kl": (sums.old_minus_new, sums.tokens),
    }
    if dual_clip is not None:
        metrics["actor/pg_clipfrac_lower"] = (sums.dual_clipped, sums.tokens)
    if batch.ref_logp is not None:
        metrics["actor/kl_loss"] = (sums.kl, count)
    if batch.entropy is not None:
        metrics["actor/entropy"] = (sums.entropy, count)
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
