"""Progress of a training run: the value that a step takes and returns, and that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

WARM_START = "warm_start"


@dataclass(frozen=True)
class TrainState:
    """Stored in a checkpoint's manifest, beside model and optimizer."""

    phase: str = WARM_START
    step: int = 0
    """Completed steps of the phase."""
    kl_coef: float | None = None
    """Coefficient of the next step, where it adapts; None is ``algorithm.kl.coef``."""
    rollbacks: int = 0
    """Returns to a checkpoint after a bad update; the tasks of a step and its seeds depend on it."""
    grad_norms: Mapping[str, list[float]] = field(default_factory=dict)
    """Model -> norms of its last updates, the measure of a spike."""

    @property
    def warming_up(self) -> bool:
        """True in the warm start."""
        return self.phase == WARM_START

    @classmethod
    def from_manifest(cls, saved: Mapping[str, Any]) -> TrainState:
        """Read a manifest; what it lacks is as at the start of a run."""
        return cls(**{name.name: saved[name.name] for name in fields(cls) if name.name in saved})
