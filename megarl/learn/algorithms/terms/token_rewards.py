"""Rewards of responses relative to their group and per token, with the KL penalty to the reference.

k1, k2, k3 (Schulman, 2020) as in ``ops/policy.py``, with logp of the step's starting policy.

r_t = [t is the last kept token]·reward − kl_coef·KL_t (with a coefficient of 0 there is no reference and no KL)

Masked tokens are skipped: estimates go from one kept token to the next.
Shape legend: N sequences of a step, n of them held by this rank, T their positions, M of them kept.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from megarl.config.algorithms import AlgorithmConfig, KLConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import GroupStats
from megarl.learn.algorithms.terms.reduction import PART, Tokens, Totals, doubles, sums, totals_of
from megarl.learn.algorithms.types import StepInput
from megarl.ops.policy import kl_estimates


def centred(reward: float, stats: GroupStats) -> float:
    """Return r − mean in float64; exactly 0 in an all-equal group; r in a group of one, which has no baseline."""
    return reward if stats.size == 1 else reward - stats.mean


LARGEST_ERROR = 0.2
"""Bound of KL / target − 1 (Ziegler et al., 1909.08593)."""


def estimates(logp: torch.Tensor, ref_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return float64 estimates in the inputs' shape, without gradient."""
    return kl_estimates((ref_logp.double() - logp.double()).detach(), estimator)


def totals(logp: torch.Tensor, ref_logp: torch.Tensor, kept: Tokens, estimator: str) -> Totals:
    """Return totals of the KL over kept tokens of log-probs [T] in the whole step; :func:`adapted` takes their mean."""
    return kept.totals(partial(estimates, estimator=estimator), logp, ref_logp)


def adapted(kl: float, responses: int, config: KLConfig) -> float:
    """Return the next step's coefficient: coef · (1 + clip(kl/target − 1, ±0.2) · responses / horizon); ``coef``
    without a target.

    The coefficient is the controller's whole state. A ``kl`` of NaN leaves it unchanged.

    Args:
        kl: Mean per token of the step that ends.
        responses: Number of responses of that step.
        config: Settings of that step, with its coefficient.

    Raises:
        ConfigError: the horizon is so short that one step could set the coefficient to 0, where it would stay.
    """
    if config.target is None or kl != kl:
        return config.coef
    if responses * LARGEST_ERROR >= config.horizon:
        raise ConfigError(
            f"algorithm.kl.horizon={config.horizon} is too short for the {responses} responses of a step: the "
            f"coefficient would reach 0; set it above {responses * LARGEST_ERROR:g}"
        )
    error = min(max(kl / config.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return config.coef * (1.0 + error * responses / config.horizon)


VARIANCE_EPSILON = 1e-8


class TokenRewards(NamedTuple):
    """Values of kept tokens, one sequence after the other."""

    rewards: torch.Tensor
    """[M], float32, or the dtype of the step's log-probs and values."""
    kept: Tokens
    """The M kept tokens by sequence; a sequence may be empty."""
    cu_seqlens: torch.Tensor
    """int64 [n + 1], boundaries in ``kept``."""
    metrics: dict[str, float]
    """Metrics of the whole step."""


def token_rewards(name: str, step: StepInput, config: AlgorithmConfig) -> TokenRewards:
    """Return the rewards in the module's docstring. ``name``: the algorithm's, for messages.

    Raises:
        ConfigError: the KL is to be subtracted, but its log-probs are missing.
    """
    tokens = step.held(step.tokens)
    cu_seqlens = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
    kept = Tokens(torch.ones(int(cu_seqlens[-1]), dtype=torch.bool), tokens, step.together)
    rewards = torch.zeros(int(cu_seqlens[-1]), dtype=torch.float64, device=step.mask.device)
    metrics: dict[str, float] = {}
    kl_is_inside = config.kl.place == "reward" and config.kl.coef != 0.0
    if kl_is_inside:
        if step.old_logp is None or step.ref_logp is None:
            raise ConfigError(
                f"algorithm.kl.place=reward needs old_logp and ref_logp; {name} must list old_logp and kl in its "
                "needs, or set algorithm.kl.place to loss"
            )
        each = doubles(step.mask, partial(estimates, estimator=config.kl.estimator), step.old_logp, step.ref_logp)
        metrics["actor/reward_kl_penalty"] = kept.totals(torch.Tensor.double, each).mean
        metrics["actor/reward_kl_penalty_coeff"] = config.kl.coef
        rewards -= each.mul_(config.kl.coef)
        del each
    there = tokens > 0
    rewards[cu_seqlens[1:][there] - 1] += step.held(step.rewards).double()[there]
    if kl_is_inside:
        metrics |= totals_of(step.together(sums(rewards, tokens))[step.tokens > 0]).spread("critic/rewards")
    given = step.values if step.values is not None else step.old_logp
    return TokenRewards(rewards.to(torch.float32 if given is None else given.dtype), kept, cu_seqlens, metrics)


def whitened(values: torch.Tensor, kept: Tokens) -> torch.Tensor:
    """Return (x − μ) / sqrt(σ² + 1e-8) of ``values`` [M], in float64; μ and unbiased σ² are over the whole step. Equal
    values become exactly 0."""
    totals = kept.totals(torch.Tensor.double, values)
    result = torch.zeros_like(values)
    if not totals.number or totals.max == totals.min:
        return result
    deviation = math.sqrt(kept.variance(totals.mean, torch.Tensor.double, values) + VARIANCE_EPSILON)
    for part, x in zip(result.split(PART), values.split(PART), strict=True):
        part.copy_(x.double().sub_(totals.mean).div_(deviation))
    return result
