"""OPMD, the simple variant (Trinity-RFT, 2505.17826): a policy gradient without ratios, for samples of any policy.

A_i = r_i − mean of the group
loss = Σ_t w_t·v_t·(−A·logp_t) / (1 + tau), with GRPO's KL and entropy terms. ``old_logp`` is in ``correction`` and metrics only.
"""

from __future__ import annotations

from megarl.algorithms import surrogate, terms
from megarl.algorithms.correction import correction
from megarl.algorithms.groups import centred
from megarl.algorithms.types import Algorithm, Loss, LossInput
from megarl.config.schema import AlgorithmConfig
from megarl.schema import GroupStats


def advantage(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """A group of one has A = r, an all-equal group exactly 0."""
    return centred(reward, stats)


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """See the file's head."""
    _, advantages = surrogate.needed("opmd", batch)
    weight, metrics = correction(batch, config)
    logp, a = (terms.masked(x.double(), batch.mask) for x in (batch.logp, advantages))
    each = -a * logp / (1.0 + config.tau)
    result = surrogate.unclipped("opmd", batch, config, each if weight is None else weight.double() * each)
    return result._replace(metrics=metrics | result.metrics)


OPMD = Algorithm(
    name="opmd",
    source="Trinity-RFT, arXiv 2505.17826",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "ref_logp", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
