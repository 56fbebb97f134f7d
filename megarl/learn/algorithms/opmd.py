"""OPMD (Trinity-RFT, 2505.17826): a policy gradient without ratios, for samples of any policy.

loss = Σ_t w_t·v_t·(−A·logp_t) / (1 + tau), with GRPO's KL and entropy terms. ``old_logp`` is for ``correction`` and
metrics only.
``opmd=mean`` (the simple variant): A_i = r_i − mean of the group
``opmd=pairwise``: A_i = mean_{j≠i} (r_i − r_j), 0 in a group of one. The paper's loss is Σ_{i<j} (a_i − a_j)²,
a_i = r_i − tau·(logp_i − sg(logp_i)), sg: no gradient, logp_i: the response's sum (regularised towards the policy in
training, as in Trinity). Its gradient in a response's logp is −2·tau·(n − 1)·A_i for a group of n: the direction used
here, up to a positive factor.
"""

from __future__ import annotations

from megarl.config.algorithms import OPMDConfig
from megarl.core.schema import GroupStats
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.surrogate import correction
from megarl.learn.algorithms.terms.token_rewards import centred
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def advantage(reward: float, stats: GroupStats, config: OPMDConfig) -> float:
    """Return A; exactly 0 in an all-equal group; r in a group of one, or 0 with ``opmd=pairwise``."""
    if config.opmd == "mean":
        return centred(reward, stats)
    # Σ_j (r_i − r_j) = n·(r_i − mean).
    return 0.0 if stats.size == 1 else centred(reward, stats) * (stats.size / (stats.size - 1))


def loss(batch: LossInput, config: OPMDConfig) -> Loss:
    """Return the loss in the module's docstring."""
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
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
)
