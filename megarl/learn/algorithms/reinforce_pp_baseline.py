"""REINFORCE++-baseline (2501.03262): subtract the group's mean, then whiten over the global batch.

a_i = r_i − mean of its group
A_i = (a_i − μ) / sqrt(σ² + 1e-8), μ and unbiased σ² over all tokens of the step; each token has its response's a
The loss is GRPO's, with the k2 estimator in the preset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.schema import GroupStats
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import surrogate
from megarl.learn.algorithms.terms.token_rewards import VARIANCE_EPSILON, centred
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def advantage(reward: float, stats: GroupStats, config: AlgorithmConfig) -> float:
    """Return a, before whitening; r in a group of one, exactly 0 in an all-equal group."""
    return centred(reward, stats)


def whiten(values: Sequence[float], tokens: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """Whiten in float64, independent of the order of rows. Equal values (of rows with tokens) become exactly 0."""
    number = sum(tokens)
    known = [(a, n) for a, n in zip(values, tokens, strict=True) if n]
    if len({a for a, _ in known}) <= 1:
        return [0.0] * len(values)
    mean = math.fsum(n * a for a, n in known) / number
    variance = math.fsum(n * (a - mean) ** 2 for a, n in known) / (number - 1)
    scale = 1.0 / math.sqrt(variance + VARIANCE_EPSILON)
    return [(a - mean) * scale for a in values]


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return GRPO's loss."""
    return surrogate.clipped("reinforce_pp_baseline", batch, config)


REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce_pp_baseline",
    source="REINFORCE++, arXiv 2501.03262",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"old_logp", "kl", "advantages", "group"}),
    advantage=advantage,
    count=terms.denominator,
    loss=loss,
    finish_advantages=whiten,
)
