"""Lag of tokens in a step: which of them are trained, and how far their policy is from the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.schema import LARGEST_LAG, TrainingSample
from megarl.learn.algorithms.terms.reduction import Tokens
from megarl.learn.batching import Sequences

LARGEST_NAMED = 8
"""Lags from this on are measured together."""


def current(samples: Sequence[TrainingSample], settings: AlgorithmConfig) -> list[TrainingSample]:
    """Take out of the samples of a trajectory what older weights have sampled than its newest
    (``algorithm.segments=current``).

    By steps in the weights and not by versions: an evaluation publishes the same weights as another version.
    """
    if settings.segments == "all":
        return list(samples)
    own = [s.lag[s.response_mask] for s in samples if s.lag is not None]
    newest = min((int(lag.min(initial=LARGEST_LAG)) for lag in own), default=0)
    return [s if s.lag is None else s._replace(response_mask=s.response_mask & (s.lag == newest)) for s in samples]


def lag_metrics(sequences: Sequences, kept: Tokens) -> dict[str, float]:
    """Distance of the behaviour policy (engine) from the proximal one (trainer, start of the step), by lag, over the
    whole step.

    With w = exp(old_logp - engine_logp) of the M tokens of a lag: the effective sample size (Σw)² / Σw², as a share of
    M, and the mean of |log w|.

    Args:
        kept: The tokens that are compared.
    """
    old, engine, lag = sequences.old_logp, sequences.engine_logp, sequences.lag
    if old is None or engine is None:
        return {}
    # Another rank's sequences may have lags where these have none.
    named = kept.lengths.new_zeros(1).expand(len(old)) if lag is None else lag.clamp(max=LARGEST_NAMED)
    largest = kept.totals(torch.Tensor.double, named)
    metrics: dict[str, float] = {}
    for n in range(int(largest.max) + 1 if largest.number else 0):
        own = kept if not largest.max else replace(kept, mask=kept.mask & (named == n))
        log_ratio, distance = own.totals_of_each(_log_ratio_and_size, old, engine)
        if not log_ratio.number:
            continue
        total, squares = own.totals_of_each(partial(_weights_and_squares, top=log_ratio.max), old, engine)
        found = {"logp_diff": distance.mean, "ess": total.sum * total.sum / (squares.sum * log_ratio.number)}
        metrics |= {f"training/{name}/lag_{n}": value for name, value in found.items()}
    return metrics


def _log_ratio_and_size(old: torch.Tensor, engine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_ratio = old.double() - engine.double()
    return log_ratio, log_ratio.abs()


def _weights_and_squares(old: torch.Tensor, engine: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """w = exp(log ratio - top), and w². The factor cancels; the largest weight overflows nothing."""
    weights = (old.double() - engine.double() - top).exp()
    return weights, weights.square()
