"""Heartbeats of explorers and programs; the groups of a silent worker become free."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, select

from megarl.buffer.store.tables import GROUPS, JOB, WORKERS, GroupState
from megarl.buffer.store.transactions import Transactions, put

BUSY = "busy "
"""Prefix of the keys of explorers' times in the table ``job``."""


class WorkerTable:
    """Heartbeats of workers on the store."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def beat(self, name: str) -> None:
        """Record a heartbeat of ``name``. Safe to repeat: readers only check that the number has changed."""
        before = select(WORKERS.c.beat).where(WORKERS.c.name == name)

        def work(connection: Connection, again: bool) -> None:
            row = {"name": name, "program": self._database.program, "attempt": self._database.attempt}
            put(connection, WORKERS, [row | {"beat": (connection.scalar(before) or 0) + 1}])

        self._database.write(work)

    def beats(self) -> dict[str, int]:
        """Return name -> number of its last heartbeat; 0 for a worker with claims but no heartbeat."""
        holders = select(GROUPS.c.claimed_by).where(GROUPS.c.state == GroupState.CLAIMED).distinct()

        def look(connection: Connection) -> dict[str, int]:
            found = {str(name): 0 for name in connection.scalars(holders)}
            return found | {row.name: row.beat for row in connection.execute(select(WORKERS))}

        return self._database.read(look)

    def record_busy(self, name: str, busy: BusyTime) -> None:
        """Record the time in which an explorer had samples in flight. Safe to repeat."""
        row = {"key": BUSY + name, "value": json.dumps(busy)}
        self._database.write(lambda connection, again: put(connection, JOB, [row]))

    def busy_times(self) -> dict[str, BusyTime]:
        """Return explorer -> its last report, including ended explorers."""
        query = select(JOB).where(JOB.c.key.startswith(BUSY))
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return {row.key.removeprefix(BUSY): BusyTime(*json.loads(row.value)) for row in rows}


class BusyTime(NamedTuple):
    """Time in which an explorer had samples in flight at its engines."""

    seconds: float
    """Up to ``since``, or to ``at``."""
    since: float | None
    """Wall-clock start of the current samples in flight; None without any."""
    at: float
    """Wall-clock time of this report."""

    def until(self, now: float) -> float:
        """Return the seconds up to ``now``."""
        return self.seconds if self.since is None else self.seconds + max(0.0, now - self.since)


@dataclass(frozen=True)
class _LastBeat:
    """State of a worker at the last look."""

    beat: int
    silent_s: float = 0.0
    moved: bool = False
    """True if it has sent a heartbeat since it was first seen."""


class Silence:
    """Seconds without a heartbeat of each worker, by this process's monotonic clock.

    Args:
        every_s: Seconds between two looks; a longer gap counts at most twice this, because this process and the workers
            may have been suspended together.
    """

    def __init__(self, every_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._looked = clock()
        self._seen: dict[str, _LastBeat] = {}

    def look(self, beats: Mapping[str, int]) -> None:
        """Process a new result of ``WorkerTable.beats``."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self._every_s), now
        self._seen = {name: self._glance(name, beat, passed) for name, beat in beats.items()}

    def _glance(self, name: str, beat: int, passed: float) -> _LastBeat:
        before = self._seen.get(name)
        if before is None:
            return _LastBeat(beat)
        if beat != before.beat:
            return _LastBeat(beat, moved=True)
        return _LastBeat(beat, before.silent_s + passed, before.moved)

    def longer_than(self, seconds: float) -> Collection[str]:
        """Return names of workers silent for more than ``seconds``."""
        return {name for name, seen in self._seen.items() if seen.silent_s > seconds}

    def alive(self, seconds: float) -> Collection[str]:
        """Return names of workers that sent a heartbeat and were not silent for more than ``seconds`` since."""
        return {name for name, seen in self._seen.items() if seen.moved and seen.silent_s <= seconds}
