"""PPO (1707.06347) with a critic and generalised advantage estimation (1506.02438).

δ_t = r_t + γV_{t+1} − V_t;  A_t = δ_t + γλA_{t+1};  R_t = A_t + V_t over the kept tokens of a response
r_t: ``token_rewards.py``. V after the last token is 0; with ``bootstrap_truncated`` a truncated response has the value
of the state there.
Actor: GRPO's loss (clip, KL, entropy, correction). Critic: ``value.py`` on R.
``whiten_advantages`` scales A to mean 0 and variance 1 over the step's tokens; R is unchanged.
"""

from __future__ import annotations

import torch

from megarl import ops
from megarl.config.algorithms import AlgorithmConfig, PPOConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.reduction import picked, spread_out
from megarl.learn.algorithms.terms.token_rewards import token_rewards, whitened
from megarl.learn.algorithms.terms.value import explained_variance
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput


def estimate(step: StepInput, config: PPOConfig) -> Estimate:
    """Return advantages and returns by the module's docstring. Raises ConfigError without values."""
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


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return the actor's loss in the module's docstring."""
    return surrogate.clipped("ppo", batch, config)


PPO = Algorithm(
    name="ppo",
    source="Proximal Policy Optimization, arXiv 1707.06347",
    roles=frozenset({"actor", "critic", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "values"}),
    advantage=None,
    count=terms.denominator,
    loss=loss,
    estimate=estimate,
    shares=True,
)
