"""Objectives of training: algorithms from ``megarl.learn.algorithms``, applied to the tokens of a micro-batch.

A step is on the host; the tensors that a loss needs for a micro-batch are moved to the outputs' device.

Shape legend: T' tokens of a micro-batch that are in the loss, n its sequences, K parts of a loss with a denominator
each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megarl.config.algorithms import AlgorithmConfig, PPOConfig
from megarl.learn.algorithms import Algorithm, Loss, LossInput, terms, token_returns
from megarl.learn.algorithms.terms.reduction import counts
from megarl.learn.batching import MicroBatch, Sequences
from megarl.learn.models.teaching import MoreColumns


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch in the loss, flat."""

    index: torch.Tensor
    """int64 [T'] into the flat arrays of ``Sequences``."""
    row: torch.Tensor
    """int64 [T'], index of the sequence within the micro-batch, never decreasing."""
    numbers: torch.Tensor
    """int64 [n], index of each sequence within the rank's ``Sequences``."""
    num_rows: int
    """n."""
    place: torch.Tensor
    """bool [b, S]: positions of these tokens in the micro-batch."""

    @property
    def mask(self) -> torch.Tensor:
        return torch.ones_like(self.row, dtype=torch.bool)

    @staticmethod
    def of(batch: MicroBatch, sequences: Sequences) -> LossTokens:
        place = batch.take(sequences.mask, False)
        return LossTokens(batch.index[place], batch.row[place], batch.numbers, len(batch.numbers), place)


@dataclass(frozen=True)
class Objective:
    name: str
    """Prefix of its metrics' names: the role in training."""
    count: Callable[[LossTokens], torch.Tensor]
    """This micro-batch's share of the global denominators, [K] or a scalar."""
    loss: Callable[[LossTokens, torch.Tensor], Loss]
    """(tokens, the head's outputs [T', k]) -> sums on the outputs' device, never divided."""
    columns: MoreColumns | None = None
    """Adds columns to the head's outputs; None for those of ``Head`` alone."""


@dataclass(frozen=True)
class Taught:
    """Distillation over distributions: the divergence of each token, as the third output of the head."""

    columns: MoreColumns
    weights: torch.Tensor
    """float64 [n], ``weight`` of each held sequence's teacher; 0 for a sequence without one."""
    tokens: torch.Tensor | None = None
    """bool [T], as ``LossInput.taught``."""


def policy(
    algorithm: Algorithm,
    settings: AlgorithmConfig,
    sequences: Sequences,
    *,
    unchanged: bool = False,
    taught: Taught | None = None,
) -> Objective:
    """Make the objective from the algorithm's loss of log-probs.

    Args:
        unchanged: The weights are the update's starting weights, so the outputs serve as ``old_logp``.
        taught: None without a divergence from teachers' distributions.
    """
    share, first = sample_shares(sequences)

    def by_row(values: torch.Tensor | None, kept: LossTokens) -> torch.Tensor | None:
        return None if values is None else values[kept.numbers]

    def count(kept: LossTokens) -> torch.Tensor:
        mask = terms.counted(kept.mask, kept.row, settings, by_row(first, kept))
        return algorithm.denominators(mask, kept.row, kept.num_rows, settings, by_row(sequences.expert, kept))

    def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
        def picked(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[kept.index]

        logp = outputs[:, 0]
        return algorithm.loss(
            LossInput(
                logp=logp,
                entropy=outputs[:, 1] if outputs.shape[1] > 1 else None,
                old_logp=logp.detach() if unchanged else picked(sequences.old_logp),
                ref_logp=picked(sequences.ref_logp),
                advantages=picked(sequences.advantages),
                mask=kept.mask,
                row=kept.row,
                num_rows=kept.num_rows,
                engine_logp=picked(sequences.engine_logp),
                expert=by_row(sequences.expert, kept),
                share=by_row(share, kept),
                first=by_row(first, kept),
                divergence=None if taught is None else outputs[:, 2],
                teacher_weights=None if taught is None else by_row(taught.weights, kept),
                taught=None if taught is None else picked(taught.tokens),
            ).to(outputs.device),
            settings,
        )

    return Objective("actor", count, loss, None if taught is None else taught.columns)


def sample_shares(sequences: Sequences) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return ``LossInput.share`` and ``LossInput.first`` of the sequences [n]; None if each trajectory is one sequence.
    Every rank calls it: several ranks may hold samples of a trajectory."""
    if sequences.trajectory is None:
        return None, None
    tokens = sequences.together(counts(sequences.mask, sequences.lengths)).double()
    number = torch.unique_consecutive(sequences.together(sequences.trajectory), return_inverse=True)[1]
    of_trajectory = torch.zeros_like(tokens).index_add_(0, number, tokens)[number]
    before = tokens.cumsum(0) - tokens
    first = (tokens > 0) & (before == before[torch.searchsorted(number, number)])
    return sequences.held(tokens / of_trajectory.clamp(min=1.0)), sequences.held(first)


def preference_scores(algorithm: Algorithm, settings: AlgorithmConfig, margins: torch.Tensor) -> Objective:
    """Make the objective from the algorithm's loss of scores: each sequence keeps one token; sequences 2i and 2i + 1 of
    the step are pair i.

    ``margins``: float32, one for each pair of the step.
    """

    def count(kept: LossTokens) -> torch.Tensor:
        return algorithm.denominators(kept.mask, kept.row, kept.num_rows, settings)

    def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
        return algorithm.loss(
            LossInput(
                logp=torch.zeros_like(outputs[:, 0]),
                entropy=None,
                old_logp=None,
                ref_logp=None,
                advantages=None,
                mask=kept.mask,
                row=kept.row,
                num_rows=kept.num_rows,
                scores=outputs[:, 0],
                margin=margins[kept.numbers[::2] // 2],
            ).to(outputs.device),
            settings,
        )

    return Objective("actor", count, loss)


def returns(settings: AlgorithmConfig, sequences: Sequences) -> Objective:
    """Make the critic's objective: values near the returns."""
    assert isinstance(settings, PPOConfig), "ppo and algorithms of a user's file train a critic"
    assert sequences.values is not None and sequences.returns is not None, "the inference phase fills both"
    before, target = sequences.values, sequences.returns

    def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
        old, wanted = (x[kept.index].to(outputs.device) for x in (before, target))
        return token_returns.critic_loss(outputs[:, 0], old, wanted, settings)

    return Objective("critic", lambda kept: token_returns.critic_count(kept.mask), loss)
