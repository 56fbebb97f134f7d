"""Facts of a run that do not change while a trainer process lives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.core.config import Config
from megarl.explore.store import Store


@dataclass(frozen=True)
class RunContext:
    """One trainer rank's place in its run."""

    config: Config
    run_dir: Path
    attempt: int
    """Number of this start of the job; stores and files refuse an older one."""
    rank: int

    def open_store(self) -> Store:
        """Open the store, whose tables the supervisor has made. A rank that neither reads nor writes never connects: a
        job may have more ranks than a database sessions."""
        store = self.config.store
        return Store(store.url, attempt=self.attempt, outage_s=store.outage_s, has_tables=True)
