"""Algorithms with an advantage for each token, from returns: ppo, reinforce_pp, remax; and the critic's loss.

R: the returns of GAE, V_old: values at the start of the step, c: ``value_clip`` (null: ½(V − R)²). Computed in float64.

r_t: ``token_rewards.py`` (with ``kl.place=reward`` it includes the KL). The actor's loss is GRPO's (clip, KL, entropy,
correction). ``whiten_advantages`` scales A to mean 0 and variance 1 over the step's tokens; returns are unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megarl import ops
from megarl.config.algorithms import PPOConfig, ReinforcePPConfig, ReMaxConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.reduction import Tokens, picked, repeated, spread_out
from megarl.learn.algorithms.terms.token_rewards import token_rewards, whitened
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, StepInput


def critic_count(mask: torch.Tensor) -> torch.Tensor:
    """Return this micro-batch's share of the global denominator: its kept tokens, int64 scalar."""
    return mask.sum()


def critic_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    config: PPOConfig,
    mask: torch.Tensor | None = None,
) -> Loss:
    """Return the sum over the tokens of a micro-batch.

    Args:
        values: float [T], with gradient; ``old_values`` and ``returns`` [T] get none.
        mask: bool [T], None for all; masked values are ignored, even NaN.
    """
    keep = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    v, old, target = (terms.masked(x.double(), keep) for x in (values, old_values.detach(), returns.detach()))
    each = (v - target).square()
    clipped = torch.zeros_like(keep)
    if config.value_clip is not None:
        bounded = (torch.clamp(v, old - config.value_clip, old + config.value_clip) - target).square()
        clipped, each = bounded > each, torch.maximum(each, bounded)
    total, tokens = 0.5 * each.sum(), keep.sum()
    metrics = {
        "critic/vf_loss": (total.detach(), tokens),
        "critic/vf_clipfrac": (clipped.sum(), tokens),
        "critic/vpred_mean": (v.detach().sum(), tokens),
    }
    return Loss(total.to(values.dtype), metrics)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, kept: Tokens) -> float:
    """Return 1 − Var(R − V) / Var(R) over the kept tokens of a step ([T] each), in float64: 1 for a perfect critic, 0
    for a constant one, below 0 for a worse one. 0 if all returns are equal or there are none."""
    total = kept.totals(torch.Tensor.double, returns)
    if total.number < 2 or total.max == total.min:
        return 0.0

    def rest(r: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return r.double() - v.double()

    unexplained = kept.variance(kept.totals(rest, returns, values).mean, rest, returns, values)
    return 1.0 - unexplained / kept.variance(total.mean, torch.Tensor.double, returns)


def generalised(step: StepInput, config: PPOConfig) -> Estimate:
    """Return advantages and returns by generalised advantage estimation (1506.02438) over a response's kept tokens.

    δ_t = r_t + γV_{t+1} − V_t;  A_t = δ_t + γλA_{t+1};  R_t = A_t + V_t
    V after the last token is 0; with ``bootstrap_truncated`` a truncated response has the value of the state there.
    Raises ConfigError without values.
    """
    if step.values is None:
        raise ConfigError("ppo needs the values of a critic for its advantages; the trainer must compute them first")
    rewards, kept, cu_seqlens, metrics = token_rewards("ppo", step, config)
    values = picked(step.values, step.mask)
    bootstrap = values.new_zeros(len(kept.lengths)) if step.bootstrap is None else step.bootstrap.to(values.dtype)
    advantages, returns = ops.gae(rewards, values, cu_seqlens, gamma=config.gamma, lam=config.lam, bootstrap=bootstrap)
    del rewards
    for name, found in (("critic/values", values), ("critic/returns", returns)):
        metrics |= kept.totals(torch.Tensor.double, found).spread(name)
    metrics["critic/vf_explained_var"] = explained_variance(values, returns, kept)
    del values
    if config.whiten_advantages:
        advantages = whitened(advantages, kept)
    return Estimate(spread_out(advantages, step.mask), spread_out(returns, step.mask), metrics)


def whitened_returns(step: StepInput, config: ReinforcePPConfig) -> Estimate:
    """Return A_t = (G_t − μ) / sqrt(σ² + 1e-8), G_t = Σ_{u≥t} γ^(u−t)·r_u; μ and unbiased σ² over all tokens of the
    step. Equal returns have A exactly 0."""
    rewards, kept, cu_seqlens, metrics = token_rewards("reinforce_pp", step, config)
    following = ops.discounted_returns(rewards, cu_seqlens, config.gamma, rewards.new_zeros(len(kept.lengths)))
    return Estimate(spread_out(whitened(following, kept), step.mask), None, metrics)


def minus_greedy(step: StepInput, config: ReMaxConfig) -> Estimate:
    """Return A_t = Σ_{u≥t} γ^(u−t)·r_u − r(greedy); with γ = 1 and the KL in the loss it is r − r(greedy).

    The baseline is the reward of the prompt's greedy response: no critic, no group. Raises ConfigError without greedy
    rewards.
    """
    if step.greedy is None:
        raise ConfigError("remax needs the reward of each prompt's greedy answer; the explorer must ask for it")
    rewards, kept, cu_seqlens, metrics = token_rewards("remax", step, config)
    following = ops.discounted_returns(rewards, cu_seqlens, config.gamma, rewards.new_zeros(len(kept.lengths)))
    advantages = following.double().sub_(repeated(step.held(step.greedy).double(), kept.lengths)).to(rewards.dtype)
    metrics["critic/greedy_rewards/mean"] = float(step.greedy.double().mean())
    if config.whiten_advantages:
        advantages = whitened(advantages, kept)
    return Estimate(spread_out(advantages, step.mask), None, metrics)


PPO = Algorithm(
    name="ppo",
    source="Proximal Policy Optimization, arXiv 1707.06347",
    roles=frozenset({"actor", "critic", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "values"}),
    advantage=None,
    count=terms.denominator,
    loss=partial(surrogate.clipped, "ppo"),
    estimate=generalised,
    shares=True,
)
"""The critic's loss: ``critic_loss`` on R = A + V."""
REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    source="REINFORCE++, arXiv 2501.03262",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages"}),
    advantage=None,
    count=terms.denominator,
    loss=partial(surrogate.clipped, "reinforce_pp"),
    estimate=whitened_returns,
    shares=True,
)
REMAX = Algorithm(
    name="remax",
    source="ReMax, arXiv 2310.10505",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "greedy"}),
    advantage=None,
    count=terms.denominator,
    loss=partial(surrogate.clipped, "remax"),
    estimate=minus_greedy,
    shares=True,
)
ROWS: tuple[Algorithm[Any], ...] = (PPO, REINFORCE_PP, REMAX)
