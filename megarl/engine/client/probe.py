"""Comparison of a fixed text's log-probs on both sides of a weight sync, and of an engine's two ways to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.core.errors import WeightsDiffer

PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05}
"""sync.probe_tolerance where it is not set. In bfloat16 two implementations were 0.004 apart on a toy model."""
DECODED = 8
"""Tokens that an engine samples after the probe text, where the context has room."""


class Probed(NamedTuple):
    """An engine's log-probs, at temperature 1."""

    prefill: Sequence[float]
    """Of the probe text's tokens from the second on, computed as a prompt's."""
    decode: Sequence[float] = ()
    """Of tokens that it sampled after the text, one at a time: on a GPU by captured graphs."""
    again: Sequence[float] = ()
    """Of the same tokens, computed as a prompt's."""


@dataclass(frozen=True)
class ProbeText:
    """A short fixed text, and what the trainer computes for it."""

    token_ids: Sequence[int]
    trainer_logp: Sequence[float]
    """Log-probs of ``token_ids[1:]`` at temperature 1; they count on rank 0 only."""
    tolerance: float
    decode: int = DECODED
    """Tokens that an engine samples after it."""

    def check(self, engine: Probed) -> float:
        """Return the largest difference of an engine's log-probs from the trainer's. Raises WeightsDiffer."""
        return check_probe(engine, self.trainer_logp, self.tolerance).max_difference


class ProbeResult(NamedTuple):
    """Log-probs of the probe text on both sides: largest difference, and where the largest share of a log-prob is."""

    max_difference: float
    position: int


def check_probe(engine: Probed, trainer: Sequence[float], tolerance: float) -> ProbeResult:
    """Compare log-probs of the same fixed tokens, as the engine and the trainer compute them with the same weights,
    and those of tokens that the engine sampled with its own of the same tokens as a prompt.

    A token's difference counts in multiples of max(1, |log-prob|): logits that are rounded to bfloat16 are off by up to
    2^-9 of their size, so that of an unlikely token 0.06 is a rounding.

    Raises:
        WeightsDiffer: they differ by more than ``tolerance`` or are not numbers; equal stored weights that compute
            something else (an old packed copy, stale keys and values, another rope, a captured graph that reads freed
            weights) show here.
    """
    found, more = _largest(engine.prefill, trainer, tolerance)
    if more:
        raise WeightsDiffer(
            f"after a sync the engine's log-prob of token {found.position + 1} of the probe text is "
            f"{engine.prefill[found.position]:.6f}, the trainer's {trainer[found.position]:.6f}: {more}; the stored "
            "weights agree, so the engine computes from other ones or computes another function"
        )
    if engine.decode:
        own, more = _largest(engine.decode, engine.again, tolerance)
        if more:
            raise WeightsDiffer(
                f"after a sync the engine's decode gave token {own.position + 1} of those that it sampled after the "
                f"probe text the log-prob {engine.decode[own.position]:.6f}, its prefill gives it "
                f"{engine.again[own.position]:.6f}: {more}; prefill agrees with the trainer, so decode computes from "
                "other weights (a captured graph that reads old ones) or from other keys and values"
            )
    return found


def _largest(found: Sequence[float], expected: Sequence[float], tolerance: float) -> tuple[ProbeResult, str]:
    """The largest difference, and where it is largest in multiples of max(1, |expected|); words where that is more than
    ``tolerance``."""
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    shares = [d / max(1.0, abs(b)) for d, b in zip(differences, expected, strict=True)]
    position = max(range(len(shares)), key=lambda i: (shares[i] != shares[i], shares[i]))
    words = f"{differences[position]:.2e} apart, more than sync.probe_tolerance={tolerance:g} of max(1, its size)"
    return ProbeResult(max(differences), position), "" if shares[position] <= tolerance else words
