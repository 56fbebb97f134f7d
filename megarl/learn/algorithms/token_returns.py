"""Algorithms with an advantage for each token, from returns: ppo, reinforce_pp, remax.

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
from megarl.learn.algorithms.terms.reduction import picked, repeated, spread_out
from megarl.learn.algorithms.terms.token_rewards import token_rewards, whitened
from megarl.learn.algorithms.terms.value import explained_variance
from megarl.learn.algorithms.types import Algorithm, Estimate, StepInput


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
"""The critic's loss: ``terms/value.py`` on R."""
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
