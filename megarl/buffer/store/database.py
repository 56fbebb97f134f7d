"""Databases for ``store.url``: SQLite in WAL mode, or PostgreSQL through psycopg.

A URL is either the database's own, or names where that is found, so that no password is ever written down:
``env://NAME`` is in the environment variable NAME; ``job://postgres`` is a server of the job's own
(``run/postgres.py``), whose URL the supervisor puts into ``MEGARL_STORE_URL``.
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
"""Least seconds for which another process's transaction is waited for, also by who waits for no outage."""
LOCK_S = 0.2
"""Seconds that SQLite itself waits for a lock: nobody sees a process move meanwhile, so ``Transactions`` repeats it."""
PROGRESS_STEPS = 100_000
"""Instructions of SQLite's virtual machine, some milliseconds of them, between two looks at a stop request."""
CONNECT_TIMEOUT_S = 10
IDLE_S = 30.0
"""After this, PostgreSQL ends a session that stands still inside a transaction: its process was stopped, or its node is
cut off, and others wait for the locks that it holds."""
OWN_SERVER = "job://postgres"
"""``store.url`` of a PostgreSQL server that lives as long as the job."""
VARIABLE = "MEGARL_STORE_URL"
_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
"""libpq's: a server whose machine is gone is missed after half a minute, not after the kernel's quarter of an hour."""


def is_pending(url: str) -> bool:
    """Return True if ``url`` is a server of the job's own that is not up."""
    return url == OWN_SERVER and VARIABLE not in os.environ


def check_url(url: str, nodes: int = 1) -> None:
    """Make sure that a store can be opened at ``url`` from ``nodes`` nodes; makes no file. Of a server of the job's
    own, which is not up yet, nothing is asked.

    Raises:
        ConfigError: it cannot; or it is a file, and more than one node would open it.
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
    """``url`` as people may see it: the database's own, without a password."""
    try:
        return _masked(make_url(_found(url)))
    except (ArgumentError, ValueError):
        return masked_text(url)


def reason(error: SQLAlchemyError) -> str:
    """The first line of the driver's message, without the rest of a row that it quotes."""
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _masked(url: URL) -> str:
    return url.difference_update_query(["password", "sslpassword"]).render_as_string(hide_password=True)


def _found(url: str) -> str:
    """The database's own URL. Raises ConfigError when the variable that should hold it is not set."""
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
        )  # others may repeat a password
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
    """The file of a SQLite store; None for another database. Raises ConfigError as ``open_engine``."""
    parsed = _parsed(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def sync_folder(folder: Path) -> None:
    """Return when the names of a folder's files would outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_engine(url: str, answer_s: float = BUSY_TIMEOUT_S, synchronous: str = "NORMAL") -> Engine:
    """Connects to nothing yet.

    Args:
        answer_s: How long PostgreSQL may take to answer a statement; SQLite raises after ``LOCK_S``.
        synchronous: SQLite's: FULL has every commit written through to the disk, NORMAL none.

    Raises ConfigError when the URL cannot be read or its driver is missing.
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
        # IMMEDIATE takes the write lock at once: a transaction that reads, then writes, can otherwise find the
        # database changed in between and fail, however long it waits.
        write = connection.get_execution_options().get("megarl_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def open_read_only(path: Path, stopping: Callable[[], bool] = lambda: False) -> Engine:
    """A SQLite file that is read without a change to it or its log; the log's index (``-shm``) may be made.

    A statement ends with SQLITE_INTERRUPT when ``stopping`` returns True.
    """
    engine = create_engine("sqlite://", creator=lambda: _connect_read_only(path), poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.set_progress_handler(stopping, PROGRESS_STEPS)

    return engine


def _connect_read_only(path: Path) -> sqlite3.Connection:
    # Without a log nobody writes, and only an immutable file is read without making one.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=LOCK_S)


def _open_postgres(url: URL, answer_s: float) -> Engine:
    query = dict(url.query)
    own = query.pop("options", "")
    idle = f"-c idle_in_transaction_session_timeout={IDLE_S * 1000:.0f}"
    options = " ".join([idle, *([own] if isinstance(own, str) else own)])  # the later ones, the user's, win
    settings = {"connect_timeout": CONNECT_TIMEOUT_S, **_KEEPALIVE}
    arguments = {"options": options, **{name: value for name, value in settings.items() if name not in query}}
    try:
        from megarl.buffer.store.postgres_waiting import connect

        # A store is one thread's. Statements must see what others committed before them: READ COMMITTED.
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
    """Switch to WAL. SQLite does not wait for its busy timeout here when two processes open a new file together."""
    deadline = time.monotonic() + LOCK_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
