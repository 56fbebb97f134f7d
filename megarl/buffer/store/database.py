"""Databases for ``store.url``: SQLite in WAL mode, or PostgreSQL through psycopg.

A URL is the database's, or names its source, so that no password is ever written down: ``env://NAME`` reads the
environment variable NAME; ``job://postgres`` is a server started by the job (``run/postgres.py``), with its URL in
``MEGARL_STORE_URL``.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from megarl.core.errors import ConfigError, masked_text

BUSY_TIMEOUT_S = 60.0
"""Minimum lock timeout in seconds, also with ``outage_s=0``."""
LOCK_S = 0.2
"""Lock timeout of SQLite in seconds. Short, because it blocks heartbeats; ``Transactions`` retries."""
PROGRESS_STEPS = 100_000
"""Instructions of SQLite's virtual machine (some milliseconds) between two checks for a stop request."""
CONNECT_TIMEOUT_S = 10
IDLE_S = 30.0
"""Seconds after which PostgreSQL ends a session that is idle in a transaction: its process is stopped or its node cut
off, and others wait for its locks."""
OWN_SERVER = "job://postgres"
"""``store.url`` of a PostgreSQL server that the job starts and ends."""
VARIABLE = "MEGARL_STORE_URL"
_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
"""libpq's options: detect a lost server machine after half a minute, not after the kernel's 15 minutes."""


def is_pending(url: str) -> bool:
    """Return True if ``url`` is the job's server and that is not up."""
    return url == OWN_SERVER and VARIABLE not in os.environ


def check_url(url: str, nodes: int = 1) -> None:
    """Check that a store can be opened at ``url`` from ``nodes`` nodes, without creating a file. A job's server that is
    not up yet is not checked.

    Raises:
        ConfigError: it cannot be opened; or it is a file and more than one node would open it.
    """
    if is_pending(url):
        return
    parsed = _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        if nodes > 1:
            raise ConfigError(
                f"store.url={shown(url)} is a file, which {nodes} nodes would open: SQLite's locks hold on one machine "
                f"only; set store.url={OWN_SERVER} (store=postgres) for a server of the job's own, or give "
                "postgresql://USER@HOST/DATABASE"
            )
        return
    engine = open_engine(url)
    try:
        engine.connect().close()
    except SQLAlchemyError as error:
        raise ConfigError(
            f"store.url={shown(url)} cannot be reached: {reason(error)}; start that server, fix the URL, or leave "
            "store.url out for a file in run.dir"
        ) from error
    finally:
        engine.dispose()


def shown(url: str) -> str:
    """Return the database's URL without its password, for logs."""
    try:
        return _masked(make_url(_found(url)))
    except (ArgumentError, ValueError):
        return masked_text(url)


def reason(error: SQLAlchemyError) -> str:
    """Return the first line of the driver's message, without quoted row data."""
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _masked(url: URL) -> str:
    return url.difference_update_query(["password", "sslpassword"]).render_as_string(hide_password=True)


def _found(url: str) -> str:
    """Return the database's URL. Raises ConfigError if its environment variable is not set."""
    if url != OWN_SERVER and not url.startswith("env://"):
        return url
    name = VARIABLE if url == OWN_SERVER else url.removeprefix("env://").rstrip("/")
    if not (found := os.environ.get(name)):
        why = "the job's server is not up" if url == OWN_SERVER else "export the database's URL under that name"
        raise ConfigError(f"store.url={url}: {name} is not in the environment; {why}")
    return found


def _parsed(url: str) -> URL:
    text = _found(url)
    masked = masked_text(url)
    try:
        parsed = make_url(text)
        masked = _masked(parsed)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        parsed.get_dialect()
    except (ArgumentError, ModuleNotFoundError, ValueError) as error:
        because = (
            f" ({error})" if isinstance(error, (ModuleNotFoundError, NoSuchModuleError)) else ""
        )  # the parser's error may repeat a password
        because = " (its port is not a number)" if isinstance(error, ValueError) else because
        raise ConfigError(
            f"store.url={masked} is no database that can be opened here{because}; write sqlite:///PATH, "
            "postgresql://USER@HOST:PORT/DATABASE (several hosts: "
            "postgresql://USER@/DATABASE?host=A:5432&host=B:5432), or leave it out"
        ) from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(
            f"store.url={masked} is a {parsed.get_backend_name()} database; the store knows sqlite and postgresql"
        )
    if parsed.get_backend_name() == "sqlite" and (not parsed.database or parsed.database == ":memory:"):
        raise ConfigError(
            f"store.url {masked!r} names no file; explorer and trainer share the store, so give sqlite:///PATH"
        )
    return parsed


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite store; None for another database. Raises ConfigError as ``open_engine``."""
    parsed = _parsed(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the names of its files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_engine(url: str, answer_s: float = BUSY_TIMEOUT_S, synchronous: str = "NORMAL") -> Engine:
    """Make an engine, without connecting yet.

    Args:
        answer_s: Statement timeout of PostgreSQL in seconds; SQLite raises after ``LOCK_S``.
        synchronous: SQLite's setting: FULL syncs every commit to disk, NORMAL none.

    Raises ConfigError if the URL cannot be parsed or its driver is missing.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "postgresql":
        return _open_postgres(parsed, answer_s)
    assert parsed.database is not None
    Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": LOCK_S})

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver's guess
        connection.execute(f"PRAGMA synchronous={synchronous}")
        enter_wal(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at the start: a transaction that reads, then writes, fails if the database
        # changed in between, for any lock timeout.
        write = connection.get_execution_options().get("megarl_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def open_read_only(path: Path, stopping: Callable[[], bool] = lambda: False) -> Engine:
    """Open a SQLite file without changing it or its log; the log's index (``-shm``) may be created.

    A statement fails with SQLITE_INTERRUPT once ``stopping`` returns True.
    """
    engine = create_engine("sqlite://", creator=lambda: _connect_read_only(path), poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.set_progress_handler(stopping, PROGRESS_STEPS)

    return engine


def _connect_read_only(path: Path) -> sqlite3.Connection:
    # Without a log no process writes; only ``immutable`` then reads the file without creating a log.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=LOCK_S)


def _open_postgres(url: URL, answer_s: float) -> Engine:
    query = dict(url.query)
    own = query.pop("options", "")
    idle = f"-c idle_in_transaction_session_timeout={IDLE_S * 1000:.0f}"
    options = " ".join([idle, *([own] if isinstance(own, str) else own)])  # the user's come last and win
    settings = {"connect_timeout": CONNECT_TIMEOUT_S, **_KEEPALIVE}
    arguments = {"options": options, **{name: value for name, value in settings.items() if name not in query}}
    try:
        from megarl.buffer.store.postgres_waiting import connect

        # One thread uses a store. READ COMMITTED lets each statement see all earlier commits.
        engine = create_engine(
            url.set(query=query), connect_args=arguments, isolation_level="READ COMMITTED", hide_parameters=True
        )
    except ModuleNotFoundError as missing:
        raise ConfigError(f"store.url={_masked(url)} needs the Python module {missing.name!r}; install it") from missing
    event.listen(
        engine, "do_connect", lambda dialect, record, args, settings: connect(_masked(url), answer_s, *args, **settings)
    )
    return engine


def enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL. Retries, since SQLite ignores its busy timeout here if two processes open a new file together."""
    deadline = time.monotonic() + LOCK_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
