"""Kimi k1.5's online mirror descent (2501.12599, eq. 3): a quadratic pull to the policy at the iteration's start.

A_i = r_i − mean of the group; s_i = Σ_t(logp_t − old_logp_t) over the response
loss = mean over responses of −A·s + (tau/2)·s², with GRPO's KL and entropy terms
Its gradient −(A − tau·s)·∇s is the paper's update. (The square (A − tau·s)² would have 2·tau times that gradient.)

An iteration is a trainer step: one rollout, whose ``old_logp`` all its updates share. The optimizer restarts in each
iteration, as in the paper. ``aggregation=seq_mean_token_sum`` is the paper's; others scale a response's loss as they
scale its tokens.
"""

from __future__ import annotations

import torch

from megarl.config.algorithms import MirrorDescentConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import GroupStats
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.token_rewards import centred
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def advantage(reward: float, stats: GroupStats, config: MirrorDescentConfig) -> float:
    """Return A; r in a group of one, exactly 0 in an all-equal group."""
    return centred(reward, stats)


def loss(batch: LossInput, config: MirrorDescentConfig) -> Loss:
    """Return the loss in the module's docstring. Raises ConfigError for a ``correction``: no surrogate per token
    exists."""
    if config.correction != "none":
        raise ConfigError(
            f"algorithm.correction={config.correction} weighs tokens, kimi_mirror_descent has a loss of whole "
            "responses; set it to none"
        )
    old_logp, advantages = surrogate.needed("kimi_mirror_descent", batch)
    logp, old, a = (terms.masked(x.double(), batch.mask) for x in (batch.logp, old_logp, advantages))
    change = logp - old
    s = torch.zeros(batch.num_rows, dtype=torch.float64, device=logp.device).index_add(0, batch.row, change)
    # Σ_t of a row's terms is −A·s + (tau/2)·s·s.
    return surrogate.unclipped("kimi_mirror_descent", batch, config, (0.5 * config.tau * s[batch.row] - a) * change)


KIMI_MIRROR_DESCENT = Algorithm(
    name="kimi_mirror_descent",
    source="Kimi k1.5, arXiv 2501.12599",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
    restarts_optimizer=True,
)
