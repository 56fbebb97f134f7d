"""Algorithms that learn from demonstrations or teachers: sft, mix, distill."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from megarl import ops
from megarl.config.algorithms import (
    AlgorithmConfig,
    DistillConfig,
    DivergenceConfig,
    MixConfig,
    SFTConfig,
    reads_distribution,
)
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.group_relative import divided_by_std
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.reduction import doubles, repeated, spread_out
from megarl.learn.algorithms.terms.surrogate import correction
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def teachers_divergence(
    batch: LossInput, config: DivergenceConfig, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, Metrics]:
    """Return Σ_t w_t·u·D_t, float64 with gradient, and its metrics. w_t by ``aggregation``, u the weight of the row's
    teacher, D_t from the teachers' distributions: ``ops/divergence.py``.

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


def sft_loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return Σ_t w_t·(−logp_t), w_t by ``aggregation``.

    With a ``divergence`` the loss is Σ_t w_t·(``cross_entropy_coef``·(−logp_t) + D_t), D_t from the distributions of a
    teacher that has scored the rows (``megarl data teach``). Raises ConfigError as ``teachers_divergence``.
    """
    mask = batch.mask
    weights = terms.token_weights(mask, batch.row, batch.num_rows, config, share=batch.share, dtype=batch.logp.dtype)
    count = terms.denominator(mask, batch.row, batch.num_rows, config)
    total = -(weights * terms.masked(batch.logp, mask)).sum()
    metrics = {"train/loss": (total.detach(), count)}
    if batch.entropy is not None:
        metrics["actor/entropy"] = ((weights * terms.masked(batch.entropy, mask)).sum().detach(), count)
    if not reads_distribution(config):
        return Loss(total, metrics)
    assert isinstance(config, SFTConfig), "the settings of sft, or of a user's file"
    term, of_teacher = teachers_divergence(batch, config)
    return Loss(config.cross_entropy_coef * total + term.to(total.dtype), metrics | of_teacher)


SFT = Algorithm(
    name="sft",
    source="maximum likelihood",
    roles=frozenset({"actor"}),
    needs=frozenset(),
    advantage=None,
    count=terms.denominator,
    loss=sft_loss,
    offline=True,
)


def mix_count(
    mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: MixConfig, expert: torch.Tensor
) -> torch.Tensor:
    """Return int64 [2]: this micro-batch's shares of the denominators of sampled and of expert rows."""
    of_expert = expert[row]
    return torch.stack([terms.denominator(mask & kind, row, num_rows, config) for kind in (~of_expert, of_expert)])


def mix_loss(batch: LossInput, config: MixConfig) -> Loss:
    """Return [2] sums: (1 − mu)·GRPO(sampled rows) and mu·X(expert rows), each to be divided by its global denominator.

    The result does not depend on how rows of each kind are spread over micro-batches and ranks. ``expert_loss`` chooses
    X, and ``aggregation`` the weights w_t:
    sft: Σ_t w_t·(−logp_t)
    off_policy: −Σ_t w_t·f(x_t), x_t = exp(logp_t − teacher_logp_t), f(x) = x / (x + ``expert_shaping``), or x without
    it; LUFFY's mixed-policy GRPO and policy shaping (2504.14945), with an advantage of 1 and without clipping
    Of expert rows only ``logp`` is read, and for ``off_policy`` also ``engine_logp``, which has the teacher's log-probs
    there.

    Raises:
        ConfigError: expert rows are not marked, or lack required log-probs of a teacher.
    """
    if batch.expert is None:
        raise ConfigError("mix needs to know which rows are expert rows; the trainer must give LossInput.expert")
    of_expert = batch.mask & batch.expert[batch.row]
    sampled = surrogate.clipped("mix", replace(batch, mask=batch.mask & ~of_expert), config)
    weights = terms.token_weights(of_expert, batch.row, batch.num_rows, config, share=batch.share, dtype=torch.float64)
    number = terms.denominator(of_expert, batch.row, batch.num_rows, config)
    metrics = sampled.metrics
    if config.expert_loss == "sft":
        shown = -(weights * terms.masked(batch.logp.double(), of_expert)).sum()
        metrics |= {"actor/sft_loss": (shown.detach(), number)}
    else:
        log_ratio = terms.masked(_log_ratio(batch), of_expert)
        shown = -(weights * _shaped(log_ratio, config.expert_shaping)).sum()
        ratios = terms.masked(log_ratio.detach().exp(), of_expert)
        metrics |= {"actor/expert_loss": (shown.detach(), number)}
        metrics |= {"actor/expert_ratio/mean": (ratios.sum(), of_expert.sum())}
    total = torch.stack([(1.0 - config.mu) * sampled.total, (config.mu * shown).to(sampled.total.dtype)])
    return Loss(total, metrics)


def _log_ratio(batch: LossInput) -> torch.Tensor:
    """Return float64 [T]: log of the ratio of the trained policy's probability to the teacher's."""
    if batch.engine_logp is None:
        raise ConfigError("algorithm.expert_loss=off_policy needs the teacher's log-probs; give LossInput.engine_logp")
    return batch.logp.double() - batch.engine_logp.double()


def _shaped(log_ratio: torch.Tensor, shaping: float | None) -> torch.Tensor:
    """Return f(exp(``log_ratio``)); x / (x + γ) is σ(log x − log γ), which does not overflow."""
    return log_ratio.exp() if shaping is None else torch.sigmoid(log_ratio - math.log(shaping))


MIX = Algorithm(
    name="mix",
    source="Trinity-RFT, arXiv 2505.17826",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group", "expert"}),
    advantage=divided_by_std,
    count=mix_count,
    loss=mix_loss,
)


def distill_estimate(step: StepInput, config: DistillConfig) -> Estimate:
    """Return A_t = Σ_{u≥t} γ^(u−t)·r_u + reward_coef·A_GRPO, sums over kept tokens; γ = 0 leaves the token's own term.

    r_t = w·(teacher_logp_t − old_logp_t), w: the teacher's ``weight``: the reverse KL of the sampled token as its
    reward, whose expectation is −w·KL(student ‖ teacher). With another ``divergence`` than sampled r_t = 0. With
    ``teacher_tokens`` tokens outside have no term of a teacher, also none by γ. Advantages of a sequence without a
    teacher are ``reward_coef``'s alone.

    Raises:
        ConfigError: log-probs or weights of the teachers are missing; a group has one response with ``reward_coef``;
            or ``kl.place=reward``.
    """
    if step.old_logp is None or step.teacher_logp is None or step.teacher_weights is None:
        raise ConfigError("distill needs old_logp, teacher_logp and the teachers' weights; give it teachers.NAME.path")
    if config.kl.place == "reward":
        raise ConfigError(
            "algorithm.kl.place=reward: the rewards of distill are the teachers' log-ratios; set it to loss"
        )
    tokens = step.held(step.tokens)
    found = doubles(step.mask, _difference, step.teacher_logp, step.old_logp)
    found *= 0.0 if reads_distribution(config) else repeated(step.held(step.teacher_weights), tokens)
    taught = None if step.taught is None else step.taught[step.mask]
    if taught is not None:
        found *= taught
    if config.gamma:
        rewards = found.to(step.old_logp.dtype)
        cu_seqlens = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
        found = ops.discounted_returns(rewards, cu_seqlens, config.gamma, rewards.new_zeros(len(tokens))).double()
        if taught is not None:
            found *= taught
    if config.reward_coef:
        if config.group_size == 1:
            raise ConfigError(
                f"algorithm.reward_coef={config.reward_coef:g} compares the responses of a group, and "
                "algorithm.group_size is 1; set it to 2 or more"
            )
        rewards_of = zip(step.rewards.tolist(), step.stats, strict=True)
        each = [divided_by_std(reward, stats, config) for reward, stats in rewards_of]
        found += repeated(step.held(torch.tensor(each, dtype=torch.float64)), tokens) * config.reward_coef
    return Estimate(spread_out(found.to(step.old_logp.dtype), step.mask), None, {})


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() - b.double()


def distill_loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return GRPO's loss; with another ``divergence`` than sampled plus w·v_t·D_t of each token, v_t by ``correction``.

    Of expert rows the second term is the whole loss, with v_t = 1 (GKD's data of the teacher); sums and denominators
    cover rows of both kinds.

    Raises:
        ConfigError: ``divergence`` is not sampled and the batch has no divergence.
    """
    sampled = batch
    if batch.expert is not None:
        sampled = replace(batch, mask=batch.mask & ~batch.expert[batch.row])
    result = surrogate.clipped("distill", sampled, config)
    if not reads_distribution(config):
        return result
    factors = correction(sampled, config)[0]  # 1 outside ``sampled``
    term, metrics = teachers_divergence(batch, config, factors)
    return Loss(result.total + term.to(result.total.dtype), result.metrics | metrics)


def distill_count(
    mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: DistillConfig, expert: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this micro-batch's share of the denominator of sampled and expert rows together."""
    return terms.denominator(mask, row, num_rows, config)


DISTILL = Algorithm(
    name="distill",
    source="GKD, arXiv 2306.13649; On-Policy Distillation, Thinking Machines Lab 2025",
    roles=frozenset({"actor", "reference", "teacher"}),
    needs=frozenset({"old_logp", "teacher_logp", "kl", "advantages", "expert"}),
    advantage=None,
    count=distill_count,
    loss=distill_loss,
    estimate=distill_estimate,
    shares=True,
)
"""Also MiniLLM, 2306.08543."""
ROWS: tuple[Algorithm[Any], ...] = (SFT, MIX, DISTILL)
