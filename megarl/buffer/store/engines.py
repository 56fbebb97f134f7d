"""Rows of the engines of a run, and heartbeats of explorers and programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select, update

from megarl.buffer.store.tables import ENGINE_WEIGHTS, ENGINES, GROUPS, JOB, WORKERS, GroupState
from megarl.buffer.store.transactions import Transactions, put
from megarl.core.schema import WeightsVersion
from megarl.engines.fleet import (
    BASE,
    COLUMNS,
    ColumnOwner,
    EngineRow,
    EngineStatus,
    EngineTurn,
    Key,
    ProvenWeights,
    change,
    scaled,
    without,
)

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


_READ: Mapping[str, Callable[[Any], Any]] = {"state": EngineStatus, "turn": EngineTurn}
"""Column -> conversion of its database value."""
_COLUMNS = [field.name for field in fields(EngineRow) if field.name != "weights"]


class EngineRoom(NamedTuple):
    """Capacity of a job for engines."""

    begun: int
    """Engines at the job's start; the job may always have this many."""
    workers: int
    """Most workers of all engines together, if other engines are wanted."""
    why: str
    """Settings and devices that determine it."""

    def most(self, workers: int, begun_with: int) -> int:
        """Return the most engines of ``workers`` workers each, in a job that began with ``begun_with`` workers per
        engine."""
        return max(self.workers // workers, self.begun if workers == begun_with else 0)


class EngineTable:
    """Engines of the run's jobs, by the program of the job that owns them."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def register(self, rows: Sequence[EngineRow], room: EngineRoom | None = None) -> None:
        """Replace the engine rows of this handle's job by ``rows``, and its capacity by ``room``. Safe to repeat."""

        def work(connection: Connection, again: bool) -> None:
            for table in (ENGINES, ENGINE_WEIGHTS):
                connection.execute(delete(table).where(table.c.program == self._database.program))
            _insert(connection, rows)
            if room is not None:
                put(connection, JOB, [{"key": _room_key(self._database.program), "value": json.dumps(room)}])

        self._database.write(work)

    def room(self, program: str) -> EngineRoom | None:
        """Return a job's capacity for engines, as recorded at its last start; None if not recorded."""
        query = select(JOB.c.value).where(JOB.c.key == _room_key(program))
        value = self._database.read(lambda connection: connection.scalar(query))
        return None if value is None else EngineRoom(*json.loads(value))

    def programs(self) -> list[str]:
        """Return the programs with registered engines."""
        query = select(ENGINES.c.program).distinct().order_by(ENGINES.c.program)
        return self._database.read(lambda connection: list(connection.scalars(query)))

    def read(self, programs: Collection[str] | None = None) -> list[EngineRow]:
        """Return engines of all jobs, or of ``programs``, including absent ones, by program and number; ``[]`` before a
        start and in offline jobs."""
        which = () if programs is None else (ENGINES.c.program.in_(programs),)
        return self._database.read(lambda connection: _read(connection, *which))

    def own(self) -> list[EngineRow]:
        """Engines of this handle's job by number."""
        return self.read([self._database.program])

    def scale(self, program: str, number: int, workers: int | None = None) -> tuple[int, int]:
        """Order a job to have ``number`` engines (``fleet.scaled``); return the number wanted before, and of new rows.
        Safe to repeat: only missing, surplus or differently sized engines are ordered.

        Raises ValueError if the job has registered no engines, or ``number`` is below 1.
        """

        def work(connection: Connection, again: bool) -> tuple[int, int]:
            before = _locked(connection, program)
            after = scaled(before, number, workers)
            _update(connection, before, after, COLUMNS[ColumnOwner.SCALE])
            _insert(connection, after[len(before) :])
            return sum(row.wanted for row in before), len(after) - len(before)

        return self._database.write(work)

    def order_away(self, numbers: Collection[int]) -> None:
        """Order engines of this handle's job to leave. Safe to repeat."""

        def work(connection: Connection, again: bool) -> None:
            before = _locked(connection, self._database.program)
            _update(connection, before, without(before, numbers), COLUMNS[ColumnOwner.SCALE])

        self._database.write(work)

    def turn(self, numbers: Iterable[int], turn: EngineTurn) -> dict[int, int]:
        """Order engines of this handle's job to take ``turn``; engines that leave lose their weights. Return each
        engine's order number. Safe to repeat."""

        def turned(row: EngineRow) -> EngineRow:
            weights = row.weights if turn is EngineTurn.HERE else ()
            return change(row, "turned", turn=turn, turn_order=row.turn_order + 1, weights=weights)

        changed = self._change({(self._database.program, number) for number in numbers}, turned)
        return {row.number: row.turn_order for row in changed}

    def delivered(self, starts: Mapping[Key, int], version: WeightsVersion | None, what: str = BASE) -> None:
        """Record that these starts of engines proved to have ``version``; None: that they lost all weights, including
        those kept for an evaluation. Rows of other starts stay unchanged. Safe to repeat.

        Args:
            what: ``BASE`` for the model's weights, or an adapter's name.
        """

        def deliver(row: EngineRow) -> EngineRow:
            if row.start != starts[row.key]:
                return row
            if version is None and row.holds_for:
                row = change(row, "freed", holds_for="")
            return row.with_weights(what, version)

        self._change(starts.keys(), deliver)

    def hold(self, keys: Collection[Key], rollout: str) -> None:
        """Order engines to keep their weights for the evaluation ``rollout``. Safe to repeat."""
        self._change(keys, lambda row: row if row.holds_for == rollout else change(row, "held", holds_for=rollout))

    def free(self) -> None:
        """Release all engines from keeping weights for an evaluation. Safe to repeat."""
        change_all = update(ENGINES).where(ENGINES.c.holds_for != "").values(holds_for="")
        self._database.write(lambda connection, again: connection.execute(change_all))

    def note(self, rows: Iterable[EngineRow]) -> None:
        """Write the engine rows that the job's supervisor has updated. Safe to repeat."""
        noted = list(rows)

        def work(connection: Connection, again: bool) -> None:
            for row in noted:
                values = _values(row, COLUMNS[ColumnOwner.SUPERVISOR])
                connection.execute(update(ENGINES).where(_is(row.key)).values(values))

        self._database.write(work)

    def remove(self, number: int) -> bool:
        """Delete the row of an ended engine of this handle's job; return False if it was ordered again since. Safe to
        repeat."""
        row = _is((self._database.program, number))
        over = and_(row, ~ENGINES.c.wanted, ENGINES.c.state == EngineStatus.ABSENT, ENGINES.c.done == ENGINES.c.order)

        def work(connection: Connection, again: bool) -> bool:
            connection.execute(delete(ENGINES).where(over))
            is_gone = connection.scalar(select(ENGINES.c.number).where(row)) is None
            if is_gone:
                _put_weights(connection, (self._database.program, number), ())
            return is_gone

        return self._database.write(work)

    def _change(self, keys: Collection[Key], of_row: Callable[[EngineRow], EngineRow]) -> list[EngineRow]:
        """Change existing rows in one transaction; return them."""
        programs = {program for program, _ in keys}

        def work(connection: Connection, again: bool) -> list[EngineRow]:
            rows = [row for program in sorted(programs) for row in _locked(connection, program) if row.key in keys]
            after = [of_row(row) for row in rows]
            _update(connection, rows, after, COLUMNS[ColumnOwner.TRAINER])
            return after

        return self._database.write(work)


def _read(connection: Connection, *which: ColumnElement[bool]) -> list[EngineRow]:
    held = ENGINE_WEIGHTS.c
    names = [held.what, held.version.label("proven_version"), held.start.label("proven_start")]
    joined = ENGINES.outerjoin(ENGINE_WEIGHTS, and_(held.program == ENGINES.c.program, held.number == ENGINES.c.number))
    query = select(ENGINES, *names).select_from(joined).where(*which).order_by(*ENGINES.primary_key, held.what)
    found: list[EngineRow] = []
    for _, rows in groupby(connection.execute(query), key=lambda row: (row.program, row.number)):
        row, *others = rows
        weights = tuple(
            ProvenWeights(one.what, WeightsVersion.parse(one.proven_version), one.proven_start)
            for one in (row, *others)
            if one.what is not None
        )
        values = {name: _READ.get(name, lambda value: value)(getattr(row, name)) for name in _COLUMNS}
        found.append(EngineRow(**values, weights=weights))
    return found


def _locked(connection: Connection, program: str) -> list[EngineRow]:
    """Return and lock a job's engines by number. On PostgreSQL a concurrent change waits, then reads the new rows."""
    of_program = ENGINES.c.program == program
    connection.execute(select(ENGINES).where(of_program).order_by(ENGINES.c.number).with_for_update()).all()
    return _read(connection, of_program)


def _is(key: Key) -> ColumnElement[bool]:
    return and_(ENGINES.c.program == key[0], ENGINES.c.number == key[1])


def _values(row: EngineRow, columns: Collection[str] = _COLUMNS) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _COLUMNS if name in columns}


def _update(
    connection: Connection, before: Sequence[EngineRow], after: Sequence[EngineRow], columns: Collection[str]
) -> None:
    for old, new in zip(before, after, strict=False):
        if (values := _values(new, columns)) != _values(old, columns):
            connection.execute(update(ENGINES).where(_is(new.key)).values(values))
        if new.weights != old.weights:
            _put_weights(connection, new.key, new.weights)


def _insert(connection: Connection, rows: Sequence[EngineRow]) -> None:
    if rows:
        connection.execute(insert(ENGINES), [_values(row) for row in rows])
    for row in rows:
        _put_weights(connection, row.key, row.weights)


def _put_weights(connection: Connection, key: Key, weights: Sequence[ProvenWeights]) -> None:
    """Replace the rows of an engine's weights."""
    table, (program, number) = ENGINE_WEIGHTS, key
    connection.execute(delete(table).where(table.c.program == program, table.c.number == number))
    values = [{"program": program, "number": number, **w._asdict(), "version": str(w.version)} for w in weights]
    if values:
        connection.execute(insert(table), values)


def _room_key(program: str) -> str:
    return f"engine_room {program}"
