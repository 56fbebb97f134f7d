"""From ``store.url`` to a database: SQLite in WAL mode, or what else SQLAlchemy has a driver for."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from megarl.errors import ConfigError

BUSY_TIMEOUT_S = 60.0


def check_url(url: str) -> None:
    """Raise ConfigError when no store can be opened there; makes no file."""
    if _parsed(url).get_backend_name() == "sqlite":
        return
    engine = open_engine(url)
    try:
        engine.connect().close()
    except SQLAlchemyError as error:
        raise ConfigError(
            f"store.url={engine.url.render_as_string()} cannot be reached: {str(error).splitlines()[0]}; "
            "leave it out for a file in run.dir"
        ) from error
    finally:
        engine.dispose()


def _parsed(url: str) -> URL:
    shown = url
    try:
        parsed = make_url(url)
        shown = parsed.render_as_string()  # without the password
        parsed.get_dialect()
    except (ArgumentError, ModuleNotFoundError) as error:
        raise ConfigError(
            f"store.url={shown} is no database that can be opened here ({error}); write sqlite:///PATH or leave it out"
        ) from error
    if parsed.get_backend_name() == "sqlite" and (not parsed.database or parsed.database == ":memory:"):
        raise ConfigError(
            f"store.url {url!r} names no file; explorer and trainer share the store, so give sqlite:///PATH"
        )
    return parsed


def open_engine(url: str) -> Engine:
    """Raises ConfigError when the URL cannot be read or its driver is missing."""
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite":
        try:
            return create_engine(parsed)
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"store.url {parsed.render_as_string()} needs the Python module {missing.name!r}; install it"
            ) from missing
    assert parsed.database is not None
    Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver's guess
        connection.execute("PRAGMA synchronous=NORMAL")
        _enter_wal(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at once: a transaction that reads, then writes, can otherwise find the
        # database changed in between and fail, however long it waits.
        write = connection.get_execution_options().get("megarl_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL. SQLite does not wait for its busy timeout here when two processes open a new file together."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
