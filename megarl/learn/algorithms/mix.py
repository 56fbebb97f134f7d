"""MIX (Trinity-RFT, 2505.17826): GRPO on sampled rows and supervised learning on demonstrated ones, in one update.

loss = (1 − mu)·GRPO(sampled rows) + mu·SFT(expert rows), each part divided by its own global denominator
(``aggregation``): how many rows of which kind a micro-batch or a rank happens to have changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.core.config.algorithms import MixConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.grpo import advantage
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def count(
    mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: MixConfig, expert: torch.Tensor
) -> torch.Tensor:
    """int64 [2]: this micro-batch's shares of the denominators of sampled and of expert rows."""
    of_expert = expert[row]
    return torch.stack([terms.denominator(mask & kind, row, num_rows, config) for kind in (~of_expert, of_expert)])


def loss(batch: LossInput, config: MixConfig) -> Loss:
    """[2] sums: see the file's head. What expert rows hold beside ``logp`` does not matter.

    Raises:
        ConfigError: expert rows are not marked.
    """
    if batch.expert is None:
        raise ConfigError("mix needs to know which rows are expert rows; the trainer must give LossInput.expert")
    of_expert = batch.mask & batch.expert[batch.row]
    sampled = surrogate.clipped("mix", replace(batch, mask=batch.mask & ~of_expert), config)
    weights = terms.token_weights(of_expert, batch.row, batch.num_rows, config, share=batch.share, dtype=torch.float64)
    shown = -(weights * terms.masked(batch.logp.double(), of_expert)).sum()
    number = terms.denominator(of_expert, batch.row, batch.num_rows, config)
    total = torch.stack([(1.0 - config.mu) * sampled.total, (config.mu * shown).to(sampled.total.dtype)])
    return Loss(total, sampled.metrics | {"actor/sft_loss": (shown.detach(), number)})


MIX = Algorithm(
    name="mix",
    source="Trinity-RFT, arXiv 2505.17826",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group", "expert"}),
    advantage=advantage,
    count=count,
    loss=loss,
)
