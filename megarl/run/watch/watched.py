"""A run that is watched: found, read again when its files have changed, and rarely if reading takes long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.config import load_resolved
from megarl.core.errors import ConfigError, MegarlError
from megarl.run.job_store import database_of_run
from megarl.run.launch.sweep import runs_of
from megarl.run.report.data import LoggedAlarm, ReportData, alarms_of, load
from megarl.run.run_dir.owner import is_running

REST = 20.0
"""A run is read again only after this many times the seconds that reading took: 5 % of one core at most."""
FILES = ("metrics.jsonl", "store.db", "store.db-wal", "resolved.json", "timeline", "logs")
"""Files and folders that change while a job runs."""


@dataclass(frozen=True)
class RunNow:
    """Contents of a run, as last read."""

    data: ReportData | None
    """None if it cannot be read."""
    alarms: tuple[LoggedAlarm, ...]
    error: str
    """Reason for a missing ``data``; else empty."""
    stamp: str
    """Changes with every reading."""


class WatchedRun:
    """Reads one run. Call it from one thread: a run's database is named in the environment of the process."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._now: RunNow | None = None
        self._seen: tuple[float, ...] = ()
        self._rests_until = 0.0

    def now(self) -> RunNow:
        """Return the run's contents, read again if its files have changed and the last reading is old enough."""
        begun = self._clock()
        if self._now is not None and begun < self._rests_until:
            return self._now
        seen = (*_times(self.folder), float(is_running(self.folder)))
        if self._now is None or seen != self._seen:
            self._now, self._seen = _read(self.folder, f"{begun:.6f}"), seen
        self._rests_until = self._clock() + REST * (self._clock() - begun)
        return self._now


def found_runs(given: Sequence[str]) -> dict[str, WatchedRun]:
    """Return the runs of folders by name: runs, or folders of runs. Raises ConfigError for a folder without a run."""
    folders: list[Path] = []
    for name in given:
        folder = Path(name)
        inside = [folder] if (folder / "resolved.json").is_file() else runs_of(folder)
        if not inside:
            raise ConfigError(f"{folder} is no run and has no runs; give the directory of a run, e.g. runs/quickstart")
        folders += inside
    names: dict[str, WatchedRun] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        name, number = folder.name, 2
        while name in names:
            name, number = f"{folder.name}-{number}", number + 1
        names[name] = WatchedRun(folder)
    return names


def _read(folder: Path, stamp: str) -> RunNow:
    """Read a run; an error becomes a part of what is shown, since a job may be writing or may have been killed."""
    try:
        config = load_resolved(folder / "resolved.json")
        with database_of_run(config.store.url, folder, read_only=True):
            data = load(folder, read_only=True)
        return RunNow(data, alarms_of(folder), "", stamp)
    except (MegarlError, OSError, ValueError, LookupError) as error:
        return RunNow(None, (), f"{type(error).__name__}: {error}", stamp)


def _times(folder: Path) -> Iterator[float]:
    """Yield sizes and times of the files that change while a job runs."""
    for name in FILES:
        path = folder / name
        with suppress(OSError):
            if path.is_dir():
                for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                    yield entry.stat().st_mtime
            else:
                found = path.stat()
                yield from (found.st_mtime, float(found.st_size))
