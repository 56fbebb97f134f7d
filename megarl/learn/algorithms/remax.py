"""ReMax (2310.10505): REINFORCE with the reward of the prompt's greedy response as baseline; no critic, no group.

A_t = Σ_{u≥t} γ^(u−t)·r_u − r(greedy), r_u: ``token_rewards.py``; with γ = 1 and the KL in the loss it is r − r(greedy).
``whiten_advantages`` scales A to mean 0 and variance 1 over the step's tokens. The loss is GRPO's.
"""

from __future__ import annotations

from megarl import ops
from megarl.config.algorithms import AlgorithmConfig, ReMaxConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.reduction import repeated, spread_out
from megarl.learn.algorithms.terms.token_rewards import token_rewards, whitened
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput


def estimate(step: StepInput, config: ReMaxConfig) -> Estimate:
    """Return advantages by the module's docstring. Raises ConfigError without greedy rewards."""
    if step.greedy is None:
        raise ConfigError("remax needs the reward of each prompt's greedy answer; the explorer must ask for it")
    rewards, kept, cu_seqlens, metrics = token_rewards("remax", step, config)
    following = ops.discounted_returns(rewards, cu_seqlens, config.gamma, rewards.new_zeros(len(kept.lengths)))
    advantages = following.double().sub_(repeated(step.held(step.greedy).double(), kept.lengths)).to(rewards.dtype)
    metrics["critic/greedy_rewards/mean"] = float(step.greedy.double().mean())
    if config.whiten_advantages:
        advantages = whitened(advantages, kept)
    return Estimate(spread_out(advantages, step.mask), None, metrics)


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return GRPO's loss."""
    return surrogate.clipped("remax", batch, config)


REMAX = Algorithm(
    name="remax",
    source="ReMax, arXiv 2310.10505",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "greedy"}),
    advantage=None,
    count=terms.denominator,
    loss=loss,
    estimate=estimate,
    shares=True,
)
