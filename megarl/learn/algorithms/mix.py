"""MIX (Trinity-RFT, 2505.17826): GRPO on sampled rows and supervised learning on demonstrated ones, in one update.

loss = (1 − mu)·GRPO(sampled rows) + mu·X(expert rows), each part divided by its global denominator (``aggregation``).
The result does not depend on how rows of each kind are spread over micro-batches and ranks.
``expert_loss`` chooses X, and ``aggregation`` the weights w_t:
sft: Σ_t w_t·(−logp_t)
off_policy: −Σ_t w_t·f(x_t), x_t = exp(logp_t − teacher_logp_t), f(x) = x / (x + ``expert_shaping``), or x without it;
LUFFY's mixed-policy GRPO and policy shaping (2504.14945), with an advantage of 1 and without clipping
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megarl.config.algorithms import MixConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.grpo import advantage
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def count(
    mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: MixConfig, expert: torch.Tensor
) -> torch.Tensor:
    """Return int64 [2]: this micro-batch's shares of the denominators of sampled and of expert rows."""
    of_expert = expert[row]
    return torch.stack([terms.denominator(mask & kind, row, num_rows, config) for kind in (~of_expert, of_expert)])


def loss(batch: LossInput, config: MixConfig) -> Loss:
    """Return [2] sums of the loss in the module's docstring. Of expert rows only ``logp`` is read, and for
    ``off_policy`` also ``engine_logp``, which has the teacher's log-probs there.

    Raises:
        ConfigError: expert rows are not marked, or lack required log-probs of a teacher.
    """
    if batch.expert is None:
        raise ConfigError("mix needs to know which rows are expert rows; the trainer must give LossInput.expert")
    of_expert = batch.mask & batch.expert[batch.row]
    sampled = surrogate.clipped("mix", replace(batch, mask=batch.mask & ~of_expert), config)
    weights = terms.token_weights(of_expert, batch.row, batch.num_rows, config, share=batch.share, dtype=torch.float64)
    number = terms.denominator(of_expert, batch.row, batch.num_rows, config)
    metrics = sampled.metrics
    if config.expert_loss == "sft":
        shown = -(weights * terms.masked(batch.logp.double(), of_expert)).sum()
        metrics |= {"actor/sft_loss": (shown.detach(), number)}
    else:
        log_ratio = terms.masked(_log_ratio(batch), of_expert)
        shown = -(weights * _shaped(log_ratio, config.expert_shaping)).sum()
        ratios = terms.masked(log_ratio.detach().exp(), of_expert)
        metrics |= {"actor/expert_loss": (shown.detach(), number)}
        metrics |= {"actor/expert_ratio/mean": (ratios.sum(), of_expert.sum())}
    total = torch.stack([(1.0 - config.mu) * sampled.total, (config.mu * shown).to(sampled.total.dtype)])
    return Loss(total, metrics)


def _log_ratio(batch: LossInput) -> torch.Tensor:
    """Return float64 [T]: log of the ratio of the trained policy's probability to the teacher's."""
    if batch.engine_logp is None:
        raise ConfigError("algorithm.expert_loss=off_policy needs the teacher's log-probs; give LossInput.engine_logp")
    return batch.logp.double() - batch.engine_logp.double()


def _shaped(log_ratio: torch.Tensor, shaping: float | None) -> torch.Tensor:
    """Return f(exp(``log_ratio``)); x / (x + γ) is σ(log x − log γ), which does not overflow."""
    return log_ratio.exp() if shaping is None else torch.sigmoid(log_ratio - math.log(shaping))


MIX = Algorithm(
    name="mix",
    source="Trinity-RFT, arXiv 2505.17826",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group", "expert"}),
    advantage=advantage,
    count=count,
    loss=loss,
)
