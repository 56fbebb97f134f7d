"""Facts of a run that do not change while a trainer process lives, and the progress that a step takes and returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.jobs import PROGRAM, TRAIN
from megarl.tasks import recorded


@dataclass(frozen=True)
class RunContext:
    """One trainer rank's place in its run."""

    config: Config
    run_dir: Path
    attempt: int
    """Number of this start of the job; stores and files reject an older one."""
    rank: int
    program: str = TRAIN

    @classmethod
    def of(cls, config: Config, rank: int) -> Self:
        """Read this process's place from the environment that the supervisor set."""
        program = os.environ.get(PROGRAM, TRAIN)
        return cls(config, Path(config.run.dir), int(os.environ["MEGARL_ATTEMPT"]), rank, program)

    @cached_property
    def bad_rows(self) -> dict[str, frozenset[str]]:
        """Split -> ids of the rows left out at the start of the run (``taskset.bad_rows``)."""
        return recorded(self.config.taskset, self.run_dir)

    def open_store(self) -> Store:
        """Open the store; the supervisor has made its tables. Connects on first use: a job may have more ranks than a
        database allows sessions."""
        store = self.config.store
        return Store(store.url, attempt=self.attempt, outage_s=store.outage_s, program=self.program, has_tables=True)


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
