"""On-policy distillation: the reverse KL of the sampled token to a teacher as a token's reward, or a divergence of the
teacher's and the student's distributions as a token's loss.

Sources: GKD, 2306.13649; MiniLLM, 2306.08543; On-Policy Distillation, Thinking Machines Lab, 2025.

r_t = w·(teacher_logp_t − old_logp_t), w: the teacher's ``weight``; its expectation is −w·KL(student ‖ teacher)
A_t = Σ_{u≥t} γ^(u−t)·r_u + reward_coef·A_GRPO, sums over kept tokens; γ = 0 leaves the token's own term
The loss is GRPO's.

With another ``divergence`` than sampled r_t = 0, and the loss has also w·v_t·D_t of each token, v_t by ``correction``;
D_t: ``ops/divergence.py``. Of expert rows this is the whole loss, with v_t = 1 (GKD's data of the teacher); sums and
denominators cover rows of both kinds.
With ``teacher_tokens`` tokens outside have no term of a teacher, also none by γ.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl import ops
from megarl.config.algorithms import AlgorithmConfig, DistillConfig, reads_distribution
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import grpo, terms
from megarl.learn.algorithms.terms import from_teacher, surrogate
from megarl.learn.algorithms.terms.reduction import doubles, repeated, spread_out
from megarl.learn.algorithms.terms.surrogate import correction
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput


def estimate(step: StepInput, config: DistillConfig) -> Estimate:
    """Return the advantages of the file's head. Those of a sequence without a teacher are ``reward_coef``'s alone.

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
        each = [grpo.advantage(reward, stats, config) for reward, stats in rewards_of]
        found += repeated(step.held(torch.tensor(each, dtype=torch.float64)), tokens) * config.reward_coef
    return Estimate(spread_out(found.to(step.old_logp.dtype), step.mask), None, {})


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() - b.double()


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """See the file's head.

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
    term, metrics = from_teacher.divergence(batch, config, factors)
    return Loss(result.total + term.to(result.total.dtype), result.metrics | metrics)


def count(
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
    count=count,
    loss=loss,
    estimate=estimate,
    shares=True,
)
