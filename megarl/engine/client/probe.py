"""Comparison of the log-probs of a fixed text on both sides of a weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.core.errors import WeightsDiffer

PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05}
"""sync.probe_tolerance where it is not set. In bfloat16 two implementations were 0.004 apart on a toy model."""


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
    """Log-probs of the probe text on both sides: largest difference, and where the largest share of a log-prob is."""

    max_difference: float
    position: int


def check_probe(engine: Sequence[float], trainer: Sequence[float], tolerance: float) -> ProbeResult:
    """Compare log-probs of the same fixed tokens, as the engine and the trainer compute them with the same weights.

    A token's difference counts in multiples of max(1, |log-prob|): logits that are rounded to bfloat16 are off by up to
    2^-9 of their size, so that of an unlikely token 0.06 is a rounding.

    Raises:
        WeightsDiffer: they differ by more than ``tolerance`` or are not numbers; equal stored weights that compute
            something else (an old packed copy, stale keys and values, another rope) show here.
    """
    differences = [abs(e - t) for e, t in zip(engine, trainer, strict=True)]
    shares = [d / max(1.0, abs(t)) for d, t in zip(differences, trainer, strict=True)]
    position = max(range(len(shares)), key=lambda i: (shares[i] != shares[i], shares[i]))
    if not shares[position] <= tolerance:
        raise WeightsDiffer(
            f"after a sync the engine's log-prob of token {position + 1} of the probe text is {engine[position]:.6f}, "
            f"the trainer's {trainer[position]:.6f}: {differences[position]:.2e} apart, more than "
            f"sync.probe_tolerance={tolerance:g} of max(1, its size); the stored weights agree, so the engine computes "
            "from other ones or computes another function"
        )
    return ProbeResult(max(differences), position)
