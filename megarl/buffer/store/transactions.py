"""Transactions that survive a lost connection and are fenced by the job's attempt.

**Lost connections.** A transaction with a lost connection is retried until it succeeds or the database has been
unreachable for ``outage_s``. The first try may have been committed, so each write must be safe to run twice. A retry
starts only after the first try has ended: every write of a handle holds the handle's lock.

**Fencing.** ``begin_attempt`` stores the attempt's number; every write of a handle compares it with its own. A rank
left over on a node with a dead daemon finds another number and writes nothing.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from safetensors import SafetensorError
from sqlalchemy import Connection, Engine, Table, func, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from megarl.buffer.store import database
from megarl.buffer.store.database import open_engine, open_read_only, reason, shown, sqlite_file, sync_folder
from megarl.buffer.store.tables import JOB, METADATA, REMADE, SCHEMA, SCHEMA_KEY
from megarl.core.errors import ConfigError, FencedError, JobError, StoreDamagedError
from megarl.core.jobs import TRAIN
from megarl.core.processes import heartbeat

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
TRY_S = 60.0
"""Most seconds counted between two failures: a suspended process (``scontrol suspend``) has not tried in between."""
QUIET_S = 10.0
"""Seconds before a locked file is logged."""
_INSERT: dict[str, Callable[[Table], Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
_PASSING = ("08", "40", "53", "57")
"""Classes of transient PostgreSQL errors: connection, serialization (deadlock), resources, shutdown."""
_POSTGRES_LOCKED = ("40001", "40P01", "55P03")
"""PostgreSQL's serialization_failure, deadlock_detected, and lock_not_available, which its ``lock_timeout`` raises."""
_READ_ONLY = "25006"
"""PostgreSQL's read_only_sql_transaction: a standby, or a database under maintenance."""
SQLITE_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")
_SQLITE_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT_READ")
_SQLITE_FULL = ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")  # the latter: no room for the log's index
_SQLITE_INACCESSIBLE = (
    "SQLITE_READONLY",
    "SQLITE_CANTOPEN",
    "SQLITE_PERM",
    "SQLITE_IOERR_ACCESS",
    "SQLITE_IOERR_SHMOPEN",
)
_TABLES_LOCK = 0x6D65676172  # any unused number; handles have random ones
_SYNCED = "synced"
_JITTER = random.Random()  # separate from the generator of a run's results


class Transactions:
    """One process's handle on a database. ``attempt`` fences its writes; None writes in any attempt.

    Missing tables are created, unless ``read_only`` forbids changes of a SQLite file. ``outage_s`` 0 retries nothing.

    Raises:
        ConfigError: the URL cannot be read or its driver is missing; (every method) a SQLite file cannot be opened or
            written.
        FencedError: the job has begun another attempt.
        JobError: the database cannot be reached.
    """

    def __init__(
        self,
        url: str,
        attempt: int | None,
        outage_s: float,
        *,
        read_only: bool = False,
        has_tables: bool = False,
        program: str = TRAIN,
        outlives: bool = False,
    ) -> None:
        self.shown = shown(url)
        self._attempt_key = f"attempt/{program}"
        self.program = program
        self.attempt = attempt
        self._outlives = outlives
        self._outage_s = outage_s
        self._path = sqlite_file(url)
        read_only = read_only and self._path is not None
        self.reader = (
            open_read_only(self._path)
            if self._path and read_only
            else open_engine(url, max(outage_s, database.BUSY_TIMEOUT_S))
        )
        """Connections of ``read``."""
        self.writer = self.reader.execution_options(megarl_write=True)
        """Connections of ``write``: their transactions take the write lock as they begin."""
        self._syncing = (
            open_engine(url, synchronous="FULL").execution_options(megarl_write=True) if self._path else self.writer
        )
        self._handle = secrets.randbits(62)
        self._writes = 0
        if not (read_only or has_tables):
            self.write(_make_tables)

    def close(self) -> None:
        """Close the connections."""
        self.reader.dispose()
        self._syncing.dispose()

    def check_schema(self) -> None:
        """Raise ConfigError if this version cannot read the tables. Opening a store to write checks them too."""
        self.read(_schema)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a read-only transaction."""

        def transaction() -> T:
            with self.reader.connect() as connection:
                return work(connection)

        return self._persist(lambda again: transaction())

    def write(self, work: Callable[[Connection, bool], T], engine: Engine | None = None) -> T:
        """Run ``work(connection, again)`` in a transaction and commit it.

        ``again``: an earlier try lost its connection and may have been committed. ``work`` must then not change its
        results again, and must return what it would have returned.

        Raises FencedError before ``work`` when another attempt has begun.
        """

        def transaction(again: bool) -> T:
            with (engine or self.writer).begin() as connection:
                if work is not _make_tables:
                    self._enter(connection)
                    return work(connection, again)
                result = work(connection, again)
                self._enter(connection)  # the attempt is in a table; if this raises, no tables were created
                return result

        try:
            return self._persist(transaction)
        finally:
            self._writes += 1

    def mark(self) -> tuple[int, int] | None:
        """Return a number that differs after a commit of any process; None for PostgreSQL or an unreadable file.

        It costs a tenth of a query. After a lost connection a commit may leave it the same.
        """
        if self._path is None:
            return None
        try:
            connection = self.reader.raw_connection()
            try:
                [[version]] = connection.driver_connection.execute("PRAGMA data_version").fetchall()  # type: ignore[union-attr]
            finally:
                connection.close()
        except (sqlite3.Error, SQLAlchemyError):  # the next query reports it
            return None
        return self._writes, version

    def begin_attempt(self, attempt: int, keeps: int | None = None) -> None:
        """Fence all earlier attempts; this handle then writes for the new attempt. Handles that outlive attempts go on
        if theirs is ``keeps`` or later.

        Safe to repeat: the number is stored with a mark of this call, by which a retry finds it. Waits for writes in
        progress.

        Raises FencedError when the stored number is not smaller.
        """
        value = f"{attempt} {secrets.token_hex(8)} {attempt if keeps is None else keeps}"

        def work(connection: Connection, again: bool) -> None:
            if connection.dialect.name == "postgresql":  # serialise concurrent starts
                connection.execute(select(func.pg_advisory_xact_lock(_TABLES_LOCK)))
            stored = connection.scalar(select(JOB.c.value).where(JOB.c.key == self._attempt_key))
            if stored == value:
                return
            if stored is not None and _number(stored) >= attempt:
                raise FencedError(
                    f"attempt {attempt} cannot begin: the store {self.shown} has seen attempt {_number(stored)}; end "
                    "that job; if there is none, the database is another run's or an earlier one's: give this run its "
                    "own (store.url)"
                )
            put(connection, JOB, [{"key": self._attempt_key, "value": value}])

        self.attempt = None  # or the check before ``work`` would require the old attempt
        self.write(work)
        self.attempt = attempt

    def sync(self) -> None:
        """Sync to disk all earlier commits of all processes, so that they survive a power cut.

        A commit with ``synchronous=FULL`` syncs SQLite's whole log to disk; PostgreSQL does so with every commit,
        unless its ``synchronous_commit`` is off.
        """

        def work(connection: Connection, again: bool) -> None:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SET LOCAL synchronous_commit TO on")
            put(connection, JOB, [{"key": _SYNCED, "value": str(time.time())}])

        self.write(work, self._syncing)
        if self._path is not None:
            sync_folder(self._path.parent)  # another process may have made the log

    def _enter(self, connection: Connection) -> None:
        """Take this handle's lock and check the attempt, for the whole transaction.

        SQLite serialises writers. On PostgreSQL a shared lock on the attempt's row blocks ``begin_attempt`` but not
        other writers of the attempt.
        """
        alone = func.pg_advisory_xact_lock(self._handle)
        postgres = connection.dialect.name == "postgresql"
        if self.attempt is None:
            if postgres:
                connection.execute(select(alone))
            return
        query = select(JOB.c.value, *([alone] if postgres else [])).where(JOB.c.key == self._attempt_key)
        stored = connection.scalar(query.with_for_update(read=True))
        if stored is None or not (_oldest(stored) if self._outlives else _number(stored)) <= self.attempt <= _number(
            stored
        ):
            seen = "none has begun" if stored is None else f"attempt {_number(stored)} has begun since"
            raise FencedError(
                f"this process belongs to attempt {self.attempt} of the job, but in the store {self.shown} {seen}: it "
                "may write nothing any more and ends; nothing is to be done unless both attempts were started by hand"
            )

    def _persist(self, run: Callable[[bool], T]) -> T:
        outage = Outage(self.shown, self._outage_s)
        while True:
            try:
                result = run(outage.tries > 0)
            except DBAPIError as error:
                if is_damage(error):
                    raise self._damaged(reason(error)) from error
                if _is_inaccessible(error):
                    raise self._inaccessible(error) from error
                if not passes(error):
                    raise
                if _is_read_only(error):
                    self.reader.dispose()  # a session stays read-only, perhaps on a server that is now a standby
                outage.wait(error)
                continue
            except StoreDamagedError as error:
                raise self._damaged(str(error)) from None
            except (json.JSONDecodeError, SafetensorError) as error:
                raise self._damaged(f"a row is not as it was written ({error})") from error
            outage.end()
            return result

    def _inaccessible(self, error: DBAPIError) -> ConfigError:
        return ConfigError(
            f"store.url={self.shown} cannot be opened or written ({reason(error)}); give this user the right to write "
            f"{self._path} and its folder, or set store.url to another place"
        )

    def _damaged(self, what: str) -> StoreDamagedError:
        way_on = (
            "restore it from a backup, or take another run.name"
            if self._path is None
            else f"start the run again: it sets the file aside as {self._path.name}.damaged and goes on from the "
            "newest checkpoint with a new one"
        )
        return StoreDamagedError(f"the store {self.shown} is damaged: {what}; {way_on}")


class Outage:
    """An outage seen by one call of a store: the time since its first failure, without time in which this process was
    suspended."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._lasted_s, self._looked = 0.0, 0.0
        self._warned = False
        self.tries = 0
        """Failed tries so far."""

    def wait(self, error: DBAPIError) -> None:
        """Sleep before the next try; logs a warning, for locks only if held unusually long.

        Raises:
            JobError: the outage has lasted too long.
        """
        now, waited_s = time.monotonic(), getattr(error.orig, "waited_s", 0.0)
        self._lasted_s += min(now - self._looked, max(waited_s, TRY_S)) if self.tries else waited_s
        self._looked = now
        locked, lasted = _is_locked(error), self._lasted_s
        limit_s = max(self._limit_s, database.BUSY_TIMEOUT_S) if locked else self._limit_s
        left = limit_s - lasted
        if left <= 0:
            raise JobError(
                f"the store {self._name} could not be used for {limit_s:g} s (store.outage_s={self._limit_s:g}): "
                f"{reason(error)}; "
                f"{_way_on(error)}, then run the same command again"
            ) from error
        if not self._warned and (not locked or lasted >= min(QUIET_S, database.BUSY_TIMEOUT_S)):
            self._warned = True
            log.warning("store %s: %s; trying again for up to %g s", self._name, reason(error), limit_s)
        heartbeat.count_wait()
        longest = (
            FIRST_WAIT_S if locked else min(FIRST_WAIT_S * 2 ** min(self.tries, 9), LONGEST_WAIT_S)
        )  # SQLite has waited already
        time.sleep(min(longest * _JITTER.uniform(0.5, 1.0), left))
        self.tries += 1

    def end(self) -> None:
        """Log that the database is back, if its outage was logged."""
        if self._warned:
            log.warning("store %s: back after %.1f s", self._name, self._lasted_s + time.monotonic() - self._looked)


def _number(stored: str) -> int:
    if not (number := stored.partition(" ")[0]).isdecimal():
        raise StoreDamagedError(f"a row of job is not as it was written, its attempt is {stored!r}")
    return int(number)


def _oldest(stored: str) -> int:
    """Return the attempt whose explorers and engines the stored attempt has kept."""
    words = stored.split(" ")
    return int(words[2]) if len(words) > 2 and words[2].isdecimal() else _number(stored)


def _make_tables(connection: Connection, again: bool) -> None:
    if connection.dialect.name == "postgresql":  # concurrent CREATE TABLE IF NOT EXISTS fails
        connection.execute(select(func.pg_advisory_xact_lock(_TABLES_LOCK)))
    is_new = not inspect(connection).has_table(JOB.name)
    stored = None if is_new else _schema(connection)
    if stored in REMADE:
        for table in REMADE[stored]:
            table.drop(connection, checkfirst=True)
        put(connection, JOB, [{"key": SCHEMA_KEY, "value": str(SCHEMA)}])
    METADATA.create_all(connection)
    if stored is None:
        put(connection, JOB, [{"key": SCHEMA_KEY, "value": str(SCHEMA)}])


def _schema(connection: Connection) -> str | None:
    """Return the schema's number as stored. Raises ConfigError if this version can neither use nor remake it."""
    stored = connection.scalar(select(JOB.c.value).where(JOB.c.key == SCHEMA_KEY))
    if stored not in (None, str(SCHEMA), *REMADE):
        raise ConfigError(
            f"the store has tables of schema {stored}, this version of megarl has schema {SCHEMA}; take another "
            "run.name or store.url, or run the version that made it"
        )
    return stored


def put(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows; an existing row with the same primary key gets the new values."""
    if not rows:
        return
    statement = _INSERT[connection.dialect.name](table)
    keys = [column.name for column in table.primary_key]
    others = {column.name: statement.excluded[column.name] for column in table.c if column.name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=others), rows)


def _way_on(error: DBAPIError) -> str:
    if _is_read_only(error):
        return "let this user write in it (a standby cannot; default_transaction_read_only)"
    return "make room on its disk" if _is_full(error) else "bring the database back"


def _is_locked(error: DBAPIError) -> bool:
    """Return True if another process locks SQLite's file or PostgreSQL's rows."""
    locked = getattr(error.orig, "sqlite_errorname", "").startswith(SQLITE_LOCKED)
    return locked or getattr(error.orig, "sqlstate", None) in _POSTGRES_LOCKED


def _is_read_only(error: DBAPIError) -> bool:
    """Return True if PostgreSQL refuses writes."""
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY


def _is_full(error: DBAPIError) -> bool:
    """Return True if the disk is full."""
    return (
        getattr(error.orig, "sqlite_errorname", "") in _SQLITE_FULL or getattr(error.orig, "sqlstate", None) == "53100"
    )


def _is_inaccessible(error: DBAPIError) -> bool:
    """Return True if SQLite's file or folder cannot be opened or written: permissions, a read-only mount, a folder at
    its path."""
    return getattr(error.orig, "sqlite_errorname", "").startswith(_SQLITE_INACCESSIBLE)


def is_damage(error: DBAPIError) -> bool:
    """Return True if the data are damaged. SQLite's driver has no error code for invalid text."""
    name = getattr(error.orig, "sqlite_errorname", "")
    if name.startswith(_SQLITE_DAMAGED) or "Could not decode to UTF-8" in str(error.orig):
        return True
    return getattr(error.orig, "sqlstate", None) in ("XX001", "XX002")


def passes(error: DBAPIError) -> bool:
    """Return True if the same transaction may succeed later: no connection, a lock of another process, PostgreSQL
    read-only, or a full disk."""
    if error.connection_invalidated or _is_locked(error) or _is_read_only(error):
        return True
    if not isinstance(error, OperationalError):
        return False
    if (name := getattr(error.orig, "sqlite_errorname", None)) is not None:
        return name.startswith(_SQLITE_FULL)
    state = getattr(error.orig, "sqlstate", None)  # None: not a server error
    return state is None or state.startswith(_PASSING)
