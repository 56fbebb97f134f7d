"""Comparison of the log-probs of a fixed text on both sides of a weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.core.errors import WeightsDiffer

PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05}
"""sync.probe_tolerance where it is not set."""


@dataclass(frozen=True)
class ProbeText:
    """A short fixed text, and what the trainer computes for it."""

    token_ids: Sequence[int]
    trainer_logp: Sequence[float]
    """Log-probs of ``token_ids[1:]`` at temperature 1; they count on rank 0 only."""
    tolerance: float

    def check(self, engine_logp: Sequence[float]) -> float:
        """Return the largest difference from an engine's log-probs. Raises WeightsDiffer."""
        return check_probe(engine_logp, self.trainer_logp, self.tolerance).max_difference


class ProbeResult(NamedTuple):
    """Log-probs of the probe text on both sides: largest difference, and where it is."""

    max_difference: float
    position: int


def check_probe(engine: Sequence[float], trainer: Sequence[float], tolerance: float) -> ProbeResult:
    """Compare log-probs of the same fixed tokens, as the engine and the trainer compute them with the same weights.

    Raises:
        WeightsDiffer: they differ by more than ``tolerance`` or are not numbers; equal stored weights that compute
            something else (an old packed copy, stale keys and values, another rope) show here.
    """
    differences = [abs(e - t) for e, t in zip(engine, trainer, strict=True)]
    position = max(range(len(differences)), key=lambda i: (differences[i] != differences[i], differences[i]))
    largest = differences[position]
    if not largest <= tolerance:
        raise WeightsDiffer(
            f"after a sync the engine's log-prob of token {position + 1} of the probe text is {engine[position]:.6f}, "
            f"the trainer's {trainer[position]:.6f}: {largest:.2e} apart, more than "
            f"sync.probe_tolerance={tolerance:g}; the stored weights agree, so the engine computes from other ones or "
            "computes another function"
        )
    return ProbeResult(largest, position)
