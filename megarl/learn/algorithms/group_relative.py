"""Algorithms with one advantage for a response, from its group: grpo, rloo, reinforce_pp_baseline, gspo, cispo, opmd,
kimi_mirror_descent.

Every token of response i has its advantage A_i. Most have GRPO's loss:
loss = Σ_t w_t·(v_t·max(−Aρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)) + kl.coef·KL_t − entropy_coef·H_t)
ρ by ``importance``; w_t by ``aggregation``; v_t by ``correction``; formulas, values and gradients: ``ops/policy.py``.
At ρ = 1 (on policy) its gradient is REINFORCE's, −A·∇logp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megarl.config.algorithms import AlgorithmConfig, MirrorDescentConfig, OPMDConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import GroupStats
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.surrogate import correction
from megarl.learn.algorithms.terms.token_rewards import VARIANCE_EPSILON, centred
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput

STD_EPSILON = 1e-6
ROLES = frozenset({"actor", "reference"})
NEEDS = frozenset({"old_logp", "kl", "advantages", "group"})


def minus_mean(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """Return A = r − mean of the group; r in a group of one, exactly 0 in an all-equal group."""
    return centred(reward, stats)


def divided_by_std(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """Return A = (r − mean) / (std + 1e-6), std unbiased; r in a group of one. An all-equal group has A
    exactly 0, because ``group_stats`` then returns the reward itself as mean. Computed in float64."""
    divide = config.normalize_by_std and stats.size > 1
    return centred(reward, stats) / (stats.std + STD_EPSILON if divide else 1.0)


def minus_others(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """Return A = r − mean of the group's other rewards, (r − mean)·n / (n − 1) in a group of n; r in a group of one,
    exactly 0 in an all-equal group."""
    return centred(reward, stats) * (stats.size / max(1, stats.size - 1))


def whiten(values: Sequence[float], tokens: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """Whiten over all tokens of the step, (a − μ) / sqrt(σ² + 1e-8) with unbiased σ², in float64, independent of the
    order of rows. Equal values (of rows with tokens) become exactly 0."""
    number = sum(tokens)
    known = [(a, n) for a, n in zip(values, tokens, strict=True) if n]
    if len({a for a, _ in known}) <= 1:
        return [0.0] * len(values)
    mean = math.fsum(n * a for a, n in known) / number
    variance = math.fsum(n * (a - mean) ** 2 for a, n in known) / (number - 1)
    scale = 1.0 / math.sqrt(variance + VARIANCE_EPSILON)
    return [(a - mean) * scale for a in values]


def gspo_loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return GRPO's loss with ratio and clipping per sequence: s_i = exp(mean_t(logp_t − old_logp_t)).

    With ``aggregation=seq_mean_token_mean`` each sequence counts equally, as in the paper. Raises ConfigError for
    another ``importance`` than sequence_mean.
    """
    if config.importance != "sequence_mean":
        raise ConfigError(
            f"algorithm.importance={config.importance} is not gspo, whose ratio is sequence_mean; set algorithm=gspo, "
            "which sets it, or algorithm.name=grpo"
        )
    return surrogate.clipped("gspo", batch, config)


def cispo_loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return Σ_t w_t·(−sg(min(ρ_t, 1 + clip_high))·A·logp_t), sg: no gradient, with GRPO's KL and entropy terms.

    The weight of a token's gradient is clipped, so that no token loses its gradient. There is no lower bound:
    ``clip_low`` is not used. The cap is 1 + clip_high (TRL's epsilon_high is the cap itself). Raises ConfigError for a
    ``dual_clip``.
    """
    if config.dual_clip is not None:
        raise ConfigError(f"algorithm.dual_clip={config.dual_clip} bounds nothing in cispo; leave it out")
    return surrogate.clipped("cispo", batch, config, objective="cispo")


def opmd_advantage(reward: float, stats: GroupStats, config: OPMDConfig) -> float:
    """Return A; exactly 0 in an all-equal group.

    ``opmd=mean`` (the simple variant): A_i = r_i − mean of the group, r in a group of one
    ``opmd=pairwise``: A_i = mean_{j≠i} (r_i − r_j), 0 in a group of one. The paper's loss is Σ_{i<j} (a_i − a_j)²,
    a_i = r_i − tau·(logp_i − sg(logp_i)), sg: no gradient, logp_i: the response's sum (regularised towards the policy
    in training, as in Trinity). Its gradient in a response's logp is −2·tau·(n − 1)·A_i for a group of n: the direction
    used here, up to a positive factor.
    """
    if config.opmd == "mean":
        return centred(reward, stats)
    # Σ_j (r_i − r_j) = n·(r_i − mean).
    return 0.0 if stats.size == 1 else centred(reward, stats) * (stats.size / (stats.size - 1))


def opmd_loss(batch: LossInput, config: OPMDConfig) -> Loss:
    """Return Σ_t w_t·v_t·(−A·logp_t) / (1 + tau), with GRPO's KL and entropy terms: a policy gradient without ratios,
    for samples of any policy. ``old_logp`` is for ``correction`` and metrics only."""
    _, advantages = surrogate.needed("opmd", batch)
    weight, metrics = correction(batch, config)
    logp, a = (terms.masked(x.double(), batch.mask) for x in (batch.logp, advantages))
    each = -a * logp / (1.0 + config.tau)
    result = surrogate.unclipped("opmd", batch, config, each if weight is None else weight.double() * each)
    return result._replace(metrics=metrics | result.metrics)


def mirror_descent_loss(batch: LossInput, config: MirrorDescentConfig) -> Loss:
    """Return the mean over responses of −A·s + (tau/2)·s², s_i = Σ_t(logp_t − old_logp_t), with GRPO's KL and entropy
    terms: a quadratic pull to the policy at the iteration's start.

    Its gradient −(A − tau·s)·∇s is the paper's update (eq. 3). (The square (A − tau·s)² would have 2·tau times that
    gradient.) An iteration is a trainer step: one rollout, whose ``old_logp`` all its updates share. The optimizer
    restarts in each iteration, as in the paper. ``aggregation=seq_mean_token_sum`` is the paper's; others scale a
    response's loss as they scale its tokens. Raises ConfigError for a ``correction``: no surrogate per token exists.
    """
    if config.correction != "none":
        raise ConfigError(
            f"algorithm.correction={config.correction} weighs tokens, kimi_mirror_descent has a loss of whole "
            "responses; set it to none"
        )
    old_logp, advantages = surrogate.needed("kimi_mirror_descent", batch)
    logp, old, a = (terms.masked(x.double(), batch.mask) for x in (batch.logp, old_logp, advantages))
    change = logp - old
    s = torch.zeros(batch.num_rows, dtype=torch.float64, device=logp.device).index_add(0, batch.row, change)
    # Σ_t of a row's terms is −A·s + (tau/2)·s·s.
    return surrogate.unclipped("kimi_mirror_descent", batch, config, (0.5 * config.tau * s[batch.row] - a) * change)


GRPO = Algorithm(
    name="grpo",
    source="DeepSeekMath, arXiv 2402.03300",
    roles=ROLES,
    needs=NEEDS,
    advantage=divided_by_std,
    count=terms.denominator,
    loss=partial(surrogate.clipped, "grpo"),
)
"""Also DeepSeek-R1, 2501.12948. Presets: dr_grpo (2503.20783) has ``normalize_by_std=false`` and
``aggregation=seq_mean_token_sum_norm``; dapo (2503.14476) clips higher above than below; grpo_r1 has R1's settings."""
RLOO = Algorithm(
    name="rloo",
    source="Back to Basics, arXiv 2402.14740",
    roles=ROLES,
    needs=NEEDS,
    advantage=minus_others,
    count=terms.denominator,
    loss=partial(surrogate.clipped, "rloo"),
)
"""The KL is a term of the loss here; the paper subtracts it from the reward."""
REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce_pp_baseline",
    source="REINFORCE++, arXiv 2501.03262",
    roles=ROLES,
    needs=NEEDS,
    advantage=minus_mean,
    count=terms.denominator,
    loss=partial(surrogate.clipped, "reinforce_pp_baseline"),
    finish_advantages=whiten,
)
"""The preset has the k2 estimator."""
GSPO = Algorithm(
    name="gspo",
    source="Group Sequence Policy Optimization, arXiv 2507.18071",
    roles=ROLES,
    needs=NEEDS,
    advantage=divided_by_std,
    count=terms.denominator,
    loss=gspo_loss,
)
CISPO = Algorithm(
    name="cispo",
    source="MiniMax-M1, arXiv 2506.13585",
    roles=ROLES,
    needs=NEEDS,
    advantage=divided_by_std,
    count=terms.denominator,
    loss=cispo_loss,
)
OPMD = Algorithm(
    name="opmd",
    source="Trinity-RFT, arXiv 2505.17826",
    roles=ROLES,
    needs=NEEDS,
    advantage=opmd_advantage,
    count=terms.denominator,
    loss=opmd_loss,
)
KIMI_MIRROR_DESCENT = Algorithm(
    name="kimi_mirror_descent",
    source="Kimi k1.5, arXiv 2501.12599",
    roles=ROLES,
    needs=NEEDS,
    advantage=minus_mean,
    count=terms.denominator,
    loss=mirror_descent_loss,
    restarts_optimizer=True,
)
ROWS: tuple[Algorithm[Any], ...] = (GRPO, RLOO, REINFORCE_PP_BASELINE, GSPO, CISPO, OPMD, KIMI_MIRROR_DESCENT)
