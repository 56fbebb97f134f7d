"""GRPO (DeepSeekMath, 2402.03300; DeepSeek-R1, 2501.12948): group-relative advantages, clipped surrogate, KL.

A_i = (r_i − mean) / (std + 1e-6) over the group, the same for every token of response i; std is unbiased.
loss = Σ_t w_t·(v_t·max(−Aρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)) + kl.coef·KL_t − entropy_coef·H_t)
ρ by ``importance``; w_t by ``aggregation``; v_t by ``correction``; formulas, values and gradients: ``ops/policy.py``.
Presets: dr_grpo (2503.20783) has ``normalize_by_std=false`` and ``aggregation=seq_mean_token_sum_norm``; dapo
(2503.14476) clips higher above than below; grpo_r1 has R1's settings.
"""

from __future__ import annotations

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.schema import GroupStats
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.token_rewards import centred
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput

STD_EPSILON = 1e-6


def advantage(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """Return A; r in a group of one. An all-equal group has A exactly 0, because ``group_stats`` then returns the
    reward itself as mean. Computed in float64."""
    divide = config.normalize_by_std and stats.size > 1
    return centred(reward, stats) / (stats.std + STD_EPSILON if divide else 1.0)


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return the loss in the module's docstring."""
    return surrogate.clipped("grpo", batch, config)


GRPO = Algorithm(
    name="grpo",
    source="DeepSeekMath, arXiv 2402.03300",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
