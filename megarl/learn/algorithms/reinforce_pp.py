"""REINFORCE++ (2501.03262): each token's return, whitened over the global batch; no critic, no group.

A_t = (G_t − μ) / sqrt(σ² + 1e-8), G_t = Σ_{u≥t} γ^(u−t)·r_u, r_u: ``token_rewards.py`` (the preset includes the KL); μ
and unbiased σ² over all tokens of the step. The loss is GRPO's.
"""

from __future__ import annotations

from megarl import ops
from megarl.config.algorithms import AlgorithmConfig, ReinforcePPConfig
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.reduction import spread_out
from megarl.learn.algorithms.terms.token_rewards import token_rewards, whitened
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput


def estimate(step: StepInput, config: ReinforcePPConfig) -> Estimate:
    """Return advantages by the module's docstring. Equal returns have A exactly 0."""
    rewards, kept, cu_seqlens, metrics = token_rewards("reinforce_pp", step, config)
    following = ops.discounted_returns(rewards, cu_seqlens, config.gamma, rewards.new_zeros(len(kept.lengths)))
    return Estimate(spread_out(whitened(following, kept), step.mask), None, metrics)


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return GRPO's loss."""
    return surrogate.clipped("reinforce_pp", batch, config)


REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    source="REINFORCE++, arXiv 2501.03262",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages"}),
    advantage=None,
    count=terms.denominator,
    loss=loss,
    estimate=estimate,
    shares=True,
)
