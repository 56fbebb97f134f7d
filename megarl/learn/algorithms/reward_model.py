"""A reward model from preferences (Bradley and Terry, 1952; InstructGPT, 2203.02155).

loss = −log σ(s_chosen − s_rejected − margin), mean over pairs; the margin (Llama 2, 2307.09288) defaults to 0.
s: output of a scalar head at the last token of prompt and response. Computed in float64.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import pairs
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def bradley_terry(scores: torch.Tensor, counted: torch.Tensor, margin: torch.Tensor | None = None) -> Loss:
    """Return the sum over pairs.

    Args:
        scores: float [2P], with gradient: chosen and rejected alternating.
        counted: bool [P]; scores and margins of other pairs are ignored, even NaN.
        margin: float [P].
    """
    chosen, rejected = (terms.masked(x, counted) for x in pairs.split(scores.double()))
    difference = chosen - rejected
    if margin is not None:
        difference = difference - terms.masked(margin.double(), counted)
    total = terms.masked(-logsigmoid(difference), counted).sum()
    metrics = {"train/loss": (total.detach(), counted.sum())} | pairs.reward_metrics(chosen, rejected, counted)
    return Loss(total.to(scores.dtype), metrics)


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return the loss in the module's docstring. Raises ConfigError without scores."""
    if batch.scores is None:
        raise ConfigError(
            f"{config.name} needs the scores of a model with a scalar head; the trainer must build that model"
        )
    counted = pairs.whole(batch.mask, batch.row, batch.num_rows)
    return bradley_terry(batch.scores, counted, batch.margin)


REWARD_MODEL = Algorithm(
    name="reward_model",
    source="Training language models to follow instructions, arXiv 2203.02155",
    roles=frozenset({"reward"}),
    needs=frozenset({"pairs"}),
    advantage=None,
    count=pairs.count,
    loss=loss,
    offline=True,
)
