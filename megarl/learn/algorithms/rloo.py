"""RLOO (2402.14740): REINFORCE with the mean of the group's other rewards as baseline.

A_i = r_i − mean_{j≠i} r_j = (r_i − mean)·n / (n − 1) in a group of n, the same for every token of response i.
The loss is GRPO's. At ρ = 1 (on policy) its gradient is REINFORCE's, −A·∇logp. The KL is a term of the loss here; the
paper subtracts it from the reward.
"""

from __future__ import annotations

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.schema import GroupStats
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.token_rewards import centred
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def advantage(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """Return A; r in a group of one, exactly 0 in an all-equal group."""
    return centred(reward, stats) * (stats.size / max(1, stats.size - 1))


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return GRPO's loss."""
    return surrogate.clipped("rloo", batch, config)


RLOO = Algorithm(
    name="rloo",
    source="Back to Basics, arXiv 2402.14740",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
