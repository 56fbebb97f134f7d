"""Algorithms that learn from pairs of responses: dpo (also ipo), online_dpo, reward_model.

Rows 2i and 2i+1 of a micro-batch are the chosen and the rejected response of pair i. A pair counts in the loss only if
both responses have a token in it; this excludes rows that pad a micro-batch. A loss is the mean over pairs, so
``aggregation`` has no effect. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from megarl.config.algorithms import AlgorithmConfig, PreferenceConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def whole(mask: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return bool [num_rows / 2]: True for pairs in which both responses have a kept token."""
    assert num_rows % 2 == 0, f"a micro-batch of pairs has an even number of rows, got {num_rows}"
    return (terms.rows_with_tokens(mask, row, num_rows) > 0).view(-1, 2).all(1)


def count(mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: AlgorithmConfig) -> torch.Tensor:
    """Return this micro-batch's share of the global denominator: its whole pairs, int64 scalar."""
    return whole(mask, row, num_rows).sum()


def sums(x: torch.Tensor, mask: torch.Tensor, row: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (chosen, rejected) float64 [num_rows / 2]: sums over the kept tokens of each response."""
    by_row = torch.zeros(num_rows, dtype=torch.float64, device=x.device)
    return split(by_row.index_add(0, row, terms.masked(x.double(), mask)))


def split(by_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (chosen, rejected) [num_rows / 2], from one value per row."""
    chosen, rejected = by_row.view(-1, 2).unbind(1)
    return chosen, rejected


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor, counted: torch.Tensor) -> Metrics:
    """Return TRL's metrics over ``counted`` pairs: how often, and by how much, the chosen response's reward is larger.

    Equal rewards count as half (in TRL as 0), so that an untrained model has an accuracy of one half.
    """
    chosen, rejected = chosen.detach()[counted], rejected.detach()[counted]
    number = counted.sum()
    return {
        "rewards/chosen": (chosen.sum(), number),
        "rewards/rejected": (rejected.sum(), number),
        "rewards/accuracies": ((chosen > rejected).sum() + (chosen == rejected).sum() / 2, number),
        "rewards/margins": ((chosen - rejected).sum(), number),
    }


def dpo_loss(batch: LossInput, config: PreferenceConfig) -> Loss:
    """Return a loss of preferences without a reward model.

    h = [Σ_t(logp − ref) of the chosen response] − [the same of the rejected response]
    sigmoid: −(1 − ε)·log σ(β·h) − ε·log σ(−β·h), ε = ``label_smoothing`` (cDPO; 0: DPO)
    ipo (2310.12036): (h − 1/(2β))², with sums over the response as in the paper (TRL averages over tokens, as the
    authors advised)

    Raises:
        ConfigError: without reference log-probs, or with a ``label_smoothing`` for ipo, which has none.
    """
    if batch.ref_logp is None:
        raise ConfigError(f"{config.name} needs ref_logp for its loss; the trainer must compute it first")
    if config.preference == "ipo" and config.label_smoothing:
        raise ConfigError(
            f"algorithm.label_smoothing={config.label_smoothing} needs preference=sigmoid; with ipo set it to 0"
        )
    place = (batch.mask, batch.row, batch.num_rows)
    counted = whole(*place)
    chosen, rejected = (
        now - ref.detach() for now, ref in zip(sums(batch.logp, *place), sums(batch.ref_logp, *place), strict=True)
    )
    h = terms.masked(chosen - rejected, counted)
    if config.preference == "ipo":
        each = (h - 1.0 / (2.0 * config.beta)).square()
    else:
        each = -(1.0 - config.label_smoothing) * logsigmoid(config.beta * h)
        each = each - config.label_smoothing * logsigmoid(-config.beta * h)
    total = terms.masked(each, counted).sum()
    metrics = {"train/loss": (total.detach(), counted.sum())}
    metrics |= reward_metrics(config.beta * chosen, config.beta * rejected, counted)
    for name, values in zip(("chosen", "rejected"), sums(batch.logp.detach(), *place), strict=True):
        metrics[f"logps/{name}"] = (values[counted].sum(), counted.sum())
    if batch.entropy is not None:
        entropy = torch.where(batch.mask, batch.entropy.detach().double(), 0.0)
        metrics["actor/entropy"] = (entropy.sum(), batch.mask.sum())
    return Loss(total.to(batch.logp.dtype), metrics)


def best_against_worst(rewards: Sequence[float], config: AlgorithmConfig) -> list[tuple[int, int]]:
    """Return [(chosen, rejected)] positions in the group, the first of equal rewards each; [] for a zero-variance
    group."""
    positions = range(len(rewards))
    best, worst = max(positions, key=rewards.__getitem__), min(positions, key=rewards.__getitem__)
    return [(best, worst)] if rewards[best] > rewards[worst] else []


def bradley_terry(scores: torch.Tensor, counted: torch.Tensor, margin: torch.Tensor | None = None) -> Loss:
    """Return the sum over pairs of −log σ(s_chosen − s_rejected − margin); the margin (Llama 2, 2307.09288) defaults
    to 0.

    Args:
        scores: float [2P], with gradient: chosen and rejected alternating.
        counted: bool [P]; scores and margins of other pairs are ignored, even NaN.
        margin: float [P].
    """
    chosen, rejected = (terms.masked(x, counted) for x in split(scores.double()))
    difference = chosen - rejected
    if margin is not None:
        difference = difference - terms.masked(margin.double(), counted)
    total = terms.masked(-logsigmoid(difference), counted).sum()
    metrics = {"train/loss": (total.detach(), counted.sum())} | reward_metrics(chosen, rejected, counted)
    return Loss(total.to(scores.dtype), metrics)


def reward_model_loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return ``bradley_terry`` of the outputs of a scalar head at the last token of prompt and response. Raises
    ConfigError without scores."""
    if batch.scores is None:
        raise ConfigError(
            f"{config.name} needs the scores of a model with a scalar head; the trainer must build that model"
        )
    counted = whole(batch.mask, batch.row, batch.num_rows)
    return bradley_terry(batch.scores, counted, batch.margin)


DPO = Algorithm(
    name="dpo",
    source="Direct Preference Optimization, arXiv 2305.18290",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"ref_logp", "pairs"}),
    advantage=None,
    count=count,
    loss=dpo_loss,
    offline=True,
)
ONLINE_DPO = Algorithm(
    name="online_dpo",
    source="Direct Language Model Alignment from Online AI Feedback, arXiv 2402.04792",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"ref_logp", "pairs", "group"}),
    advantage=None,
    count=count,
    loss=dpo_loss,
    choose_pairs=best_against_worst,
)
REWARD_MODEL = Algorithm(
    name="reward_model",
    source="Training language models to follow instructions, arXiv 2203.02155",
    roles=frozenset({"reward"}),
    needs=frozenset({"pairs"}),
    advantage=None,
    count=count,
    loss=reward_model_loss,
    offline=True,
)
"""The loss is of Bradley and Terry (1952); InstructGPT, 2203.02155."""
ROWS: tuple[Algorithm[Any], ...] = (DPO, ONLINE_DPO, REWARD_MODEL)
