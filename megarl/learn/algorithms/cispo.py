"""CISPO (MiniMax-M1, 2506.13585): clip the weight of a token's gradient, so that no token loses its gradient.

loss = Σ_t w_t·(−sg(min(ρ_t, 1 + clip_high))·A·logp_t), sg: no gradient, A as in GRPO, with GRPO's KL and entropy terms.
There is no lower bound: ``clip_low`` is not used. The cap is 1 + clip_high (TRL's epsilon_high is the cap itself).
"""

from __future__ import annotations

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.grpo import advantage
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """See the file's head. Raises ConfigError for a ``dual_clip``."""
    if config.dual_clip is not None:
        raise ConfigError(f"algorithm.dual_clip={config.dual_clip} bounds nothing in cispo; leave it out")
    return surrogate.clipped("cispo", batch, config, objective="cispo")


CISPO = Algorithm(
    name="cispo",
    source="MiniMax-M1, arXiv 2506.13585",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
