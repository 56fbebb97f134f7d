"""Progress of a training run: the value that a step takes and returns, and that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

WARM_START = "warm_start"


@dataclass(frozen=True)
class TrainState:
    """Stored in a checkpoint's manifest, next to model and optimizer."""

    phase: str = WARM_START
    step: int = 0
    """Completed steps of the phase."""
    kl_coef: float | None = None
    """Coefficient of the next step, if it adapts; None stands for ``algorithm.kl.coef``."""
    rollbacks: int = 0
    """Number of rollbacks after bad updates; a step's tasks and seeds depend on it."""
    grad_norms: Mapping[str, list[float]] = field(default_factory=dict)
    """Model -> gradient norms of its last updates, which define a spike."""

    @property
    def warming_up(self) -> bool:
        """True in the warm start."""
        return self.phase == WARM_START

    @classmethod
    def from_manifest(cls, saved: Mapping[str, Any]) -> TrainState:
        """Read a manifest; missing fields have their values at the start of a run."""
        return cls(**{name.name: saved[name.name] for name in fields(cls) if name.name in saved})
