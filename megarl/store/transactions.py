"""Transactions that outlive a lost connection, and that only the newest attempt of a job may write.

**Lost connections.** A transaction whose connection breaks is run again, until the database is back or has been away for
``outage_s``. Whether the broken one was committed cannot be known, so each write must come out the same when it is run
twice. Before a repetition looks, the broken one has ended: every write of a handle holds the handle's own lock.

**Fencing.** ``begin_attempt`` stores the attempt's number; a handle of attempt n compares it inside every write. A rank
that nobody could end, on a node whose daemon died, finds another number there and changes nothing.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError

from megarl import pulse
from megarl.errors import FencedError, JobError
from megarl.store.database import open_engine, reason, shown
from megarl.store.tables import JOB, METADATA

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
_INSERT: dict[str, Callable[[Table], Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
_PASSING = ("08", "40", "53", "57")
"""Classes of PostgreSQL's error codes that pass by themselves: connection, serialization (deadlock), resources, shutdown."""
_SQLITE_FULL = ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")  # the latter: no room for the index of the write-ahead log
_TABLES_LOCK = 0x6D65676172  # any number that nobody else takes; those of handles are random
_ATTEMPT = "attempt"
_JITTER = random.Random()  # not the generator that a run's results depend on


class Transactions:
    """One process's handle on a database. ``attempt`` fences its writes; None writes whatever is stored.

    The tables are made where they are missing. ``outage_s`` 0 runs nothing twice.

    Raises:
        ConfigError: the URL cannot be read or its driver is missing.
        FencedError: the job has begun another attempt.
        JobError: the database cannot be reached.
    """

    def __init__(self, url: str, attempt: int | None, outage_s: float) -> None:
        self.shown = shown(url)
        self.attempt = attempt
        self._outage_s = outage_s
        self._reader = open_engine(url)
        self._writer = self._reader.execution_options(megarl_write=True)
        self._handle = secrets.randbits(62)
        self.write(_make_tables)

    def close(self) -> None:
        self._reader.dispose()

    def read(self, work: Callable[[Connection], T]) -> T:
        """``work`` in a transaction that writes nothing."""

        def transaction() -> T:
            with self._reader.connect() as connection:
                return work(connection)

        return self._persist(lambda again: transaction())

    def write(self, work: Callable[[Connection, bool], T]) -> T:
        """``work(connection, again)`` in a transaction of its own, committed.

        ``again``: an earlier run was cut off, and may have been committed. ``work`` must then change nothing that was
        done already, and answer what the earlier run could not.

        Raises FencedError before ``work`` when another attempt has begun.
        """

        def transaction(again: bool) -> T:
            with self._writer.begin() as connection:
                if work is not _make_tables:
                    self._enter(connection)
                    return work(connection, again)
                result = work(connection, again)
                self._enter(connection)  # the attempt is in a table; where this raises, nothing was made
                return result

        return self._persist(transaction)

    def begin_attempt(self, attempt: int) -> None:
        """Fence all earlier attempts; this handle's writes are the new one's from now on.

        Safe to repeat: the number is stored with a mark of this call, and finding both means that it is done. Waits for
        writes that are under way.

        Raises FencedError when the stored number is not smaller.
        """
        mark = secrets.token_hex(8)

        def work(connection: Connection, again: bool) -> None:
            if connection.dialect.name == "postgresql":  # two that begin together take turns
                connection.execute(select(func.pg_advisory_xact_lock(_TABLES_LOCK)))
            stored = connection.scalar(select(JOB.c.value).where(JOB.c.key == _ATTEMPT))
            if stored == f"{attempt} {mark}":
                return
            if stored is not None and _number(stored) >= attempt:
                raise FencedError(
                    f"attempt {attempt} cannot begin: the store {self.shown} has seen attempt {_number(stored)}; end that job; "
                    "if there is none, the database is another run's or an earlier one's: give this run its own (store.url)"
                )
            put(connection, JOB, [{"key": _ATTEMPT, "value": f"{attempt} {mark}"}])

        self.attempt = None  # or the check before ``work`` would look for the attempt that is to end
        self.write(work)
        self.attempt = attempt

    def _enter(self, connection: Connection) -> None:
        """Take this handle's lock, and see that the attempt is still ours, for as long as the transaction lasts.

        SQLite's writers take turns. On PostgreSQL the row of the attempt is locked against ``begin_attempt``, which
        waits for the transaction; shared, so that the writers of one attempt do not wait for each other.
        """
        alone = func.pg_advisory_xact_lock(self._handle)
        postgres = connection.dialect.name == "postgresql"
        if self.attempt is None:
            if postgres:
                connection.execute(select(alone))
            return
        query = select(JOB.c.value, *([alone] if postgres else [])).where(JOB.c.key == _ATTEMPT)
        stored = connection.scalar(query.with_for_update(read=True))
        if stored is None or _number(stored) != self.attempt:
            seen = "none has begun" if stored is None else f"attempt {_number(stored)} has begun since"
            raise FencedError(
                f"this process belongs to attempt {self.attempt} of the job, but in the store {self.shown} {seen}: it may write "
                "nothing any more and ends; nothing is to be done unless both attempts were started by hand"
            )

    def _persist(self, run: Callable[[bool], T]) -> T:
        began: float | None = None
        wait_s = FIRST_WAIT_S
        while True:
            try:
                result = run(began is not None)
            except DBAPIError as error:
                if not passes(error):
                    raise
                now = time.monotonic()
                if began is None:
                    began = now
                    if self._outage_s > 0:
                        log.warning("store %s: %s; trying again for up to %g s", self.shown, reason(error), self._outage_s)
                if now - began >= self._outage_s:
                    raise JobError(
                        f"the store {self.shown} could not be used for {self._outage_s:g} s (store.outage_s): {reason(error)}; "
                        f"{'make room on its disk' if _is_full(error) else 'bring the database back'}, then run the same command again"
                    ) from error
                pulse.mark()  # a database that is away is no stall
                time.sleep(min(wait_s * _JITTER.uniform(0.5, 1.0), max(0.0, began + self._outage_s - now)))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            if began is not None:
                log.warning("store %s: back after %.1f s", self.shown, time.monotonic() - began)
            return result


def _number(stored: str) -> int:
    return int(stored.split()[0])


def _make_tables(connection: Connection, again: bool) -> None:
    if connection.dialect.name == "postgresql":  # CREATE TABLE IF NOT EXISTS fails when two run it together
        connection.execute(select(func.pg_advisory_xact_lock(_TABLES_LOCK)))
    METADATA.create_all(connection)


def put(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows; where a row of the same primary key is there, it takes the new values."""
    if not rows:
        return
    statement = _INSERT[connection.dialect.name](table)
    keys = [column.name for column in table.primary_key]
    others = {column.name: statement.excluded[column.name] for column in table.c if column.name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=others), rows)


def _is_full(error: DBAPIError) -> bool:
    """SQLite's word, or PostgreSQL's disk_full."""
    return getattr(error.orig, "sqlite_errorname", "") in _SQLITE_FULL or getattr(error.orig, "sqlstate", None) == "53100"


def passes(error: DBAPIError) -> bool:
    """Whether the same transaction may well succeed later: the connection broke or could not be made, SQLite's file is
    locked, or the disk is full."""
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    if (name := getattr(error.orig, "sqlite_errorname", None)) is not None:
        return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", *_SQLITE_FULL))
    state = getattr(error.orig, "sqlstate", None)  # None: it was not the server that spoke
    return state is None or state.startswith(_PASSING)
