"""Lag of tokens in a step: which of them are trained, and how far their policy is from the trainer's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.config.algorithms import AlgorithmConfig
from megarl.core.schema import LARGEST_LAG, TrainingSample
from megarl.learn.algorithms.terms.parts import doubles
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


def lag_metrics(sequences: Sequences, sampled: torch.Tensor) -> dict[str, float]:
    """Distance of the behaviour policy (engine) from the proximal one (trainer, start of the step), by lag.

    With w = exp(old_logp - engine_logp) of the N tokens of a lag: the effective sample size (Σw)² / Σw², as a share of
    N, and the mean of |log w|.

    Args:
        sampled: bool [T]; the tokens that are compared.
    """
    old, engine, lag = sequences.old_logp, sequences.engine_logp, sequences.lag
    if old is None or engine is None:
        return {}
    metrics: dict[str, float] = {}
    named = None if lag is None else lag.clamp(max=LARGEST_NAMED)
    for n in range(1 if named is None else LARGEST_NAMED + 1):
        kept = sampled if named is None else sampled & (named == n)
        log_ratio = doubles(kept, lambda a, b: a.double() - b.double(), old, engine)
        if not len(log_ratio):
            continue
        found = {"logp_diff": float(log_ratio.abs().mean())}
        weights = (log_ratio - log_ratio.max()).exp_()  # a common factor cancels; the largest weight overflows nothing
        total = float(weights.sum())
        found["ess"] = total * total / (float(weights.square_().sum()) * len(weights))
        metrics |= {f"training/{name}/lag_{n}": value for name, value in found.items()}
    return metrics
