"""Facts of a run that do not change while a trainer process lives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.core.config import Config


@dataclass(frozen=True)
class RunContext:
    """One trainer rank's place in its run."""

    config: Config
    run_dir: Path
    attempt: int
    """Number of this start of the job; stores and files refuse an older one."""
    rank: int
