"""Rewards of single tokens: the response's own at its last token, and with ``kl.place=reward`` the KL taken off each.

r_t = [t is the last kept token]·reward − kl_coef·KL_t (with a coefficient of 0 there is no reference, and no KL)

Tokens that are masked out are as if they were not there: what is estimated goes from one kept token to the next.
Shape legend: T positions of a step, M of them kept, N sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.core.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms.terms import kl
from megarl.learn.algorithms.terms.parts import doubles, sums
from megarl.learn.algorithms.types import StepInput, spread

VARIANCE_EPSILON = 1e-8


class TokenRewards(NamedTuple):
    """Values of kept tokens alone, one sequence after the other."""

    rewards: torch.Tensor
    """[M], float32, or the type of the step's log-probs and values."""
    cu_seqlens: torch.Tensor
    """int64 [N + 1]; a sequence without a kept token is empty."""
    metrics: dict[str, float]


def token_rewards(name: str, step: StepInput, config: AlgorithmConfig) -> TokenRewards:
    """See the file's head. ``name`` is the algorithm's, for messages.

    Raises:
        ConfigError: there is a KL to take off, but no log-probs to compute it from.
    """
    tokens = step.tokens
    cu_seqlens = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
    rewards = torch.zeros(int(cu_seqlens[-1]), dtype=torch.float64, device=step.mask.device)
    metrics: dict[str, float] = {}
    kl_is_inside = config.kl.place == "reward" and config.kl.coef != 0.0
    if kl_is_inside:
        if step.old_logp is None or step.ref_logp is None:
            raise ConfigError(
                f"algorithm.kl.place=reward needs old_logp and ref_logp; {name} must list old_logp and kl in its "
                "needs, or set algorithm.kl.place to loss"
            )
        each = doubles(
            step.mask, lambda own, ref: kl.estimates(own, ref, config.kl.estimator), step.old_logp, step.ref_logp
        )
        metrics["actor/reward_kl_penalty"] = float(each.mean()) if each.numel() else 0.0
        metrics["actor/reward_kl_penalty_coeff"] = config.kl.coef
        rewards -= each.mul_(config.kl.coef)
        del each
    there = tokens > 0
    rewards[cu_seqlens[1:][there] - 1] += step.rewards.double()[there]
    if kl_is_inside:
        metrics |= spread("critic/rewards", sums(rewards, tokens)[there])
    given = step.values if step.values is not None else step.old_logp
    return TokenRewards(rewards.to(torch.float32 if given is None else given.dtype), cu_seqlens, metrics)


def whitened(kept: torch.Tensor) -> torch.Tensor:
    """(x − μ) / sqrt(σ² + 1e-8), σ² the unbiased variance, in float64. Values that are all one become exactly 0."""
    x = kept.to(torch.float64, copy=True)
    if x.numel() == 0 or bool((x == x[0]).all()):
        return torch.zeros_like(kept)
    mean, deviation = x.mean(), (x.var() + VARIANCE_EPSILON).sqrt()
    return x.sub_(mean).div_(deviation).to(kept.dtype)
