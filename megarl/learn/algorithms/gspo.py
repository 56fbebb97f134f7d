"""GSPO (2507.18071): ratio and clipping per sequence instead of per token.

s_i = exp(mean_t(logp_t − old_logp_t)), A_i as in GRPO
loss = mean over sequences of max(−A·s, −A·clip(s, 1 − clip_low, 1 + clip_high)), with GRPO's KL and entropy terms.
With ``aggregation=seq_mean_token_mean`` each sequence counts equally, as in the paper; ``importance`` must be
sequence_mean.
"""

from __future__ import annotations

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.grpo import advantage
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return the loss in the module's docstring. Raises ConfigError for another ``importance``."""
    if config.importance != "sequence_mean":
        raise ConfigError(
            f"algorithm.importance={config.importance} is not gspo, whose ratio is sequence_mean; set algorithm=gspo, "
            "which sets it, or algorithm.name=grpo"
        )
    return surrogate.clipped("gspo", batch, config)


GSPO = Algorithm(
    name="gspo",
    source="Group Sequence Policy Optimization, arXiv 2507.18071",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
