"""A damaged SQLite store: found before a job opens it, and made again from the rows that can be read."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, func, insert, select
from sqlalchemy.exc import DBAPIError

from megarl.core.errors import JobError
from megarl.core.schema import GREEDY
from megarl.explore.store.checksums import CHECKSUM, is_intact
from megarl.explore.store.database import BUSY_TIMEOUT_S, open_read_only, reason, sync_folder
from megarl.explore.store.rollouts import delete_rollouts
from megarl.explore.store.tables import GROUPS, METADATA, ROLLOUTS, TRAJECTORIES, WHOLE
from megarl.explore.store.transactions import SQLITE_LOCKED, Transactions, is_damage

LARGE = (TRAJECTORIES,)
"""Left out at a start: those of the steps to come are deleted, those of earlier steps are compared where they are
read."""
_BATCH = 1000
_FILES = ("", "-wal", "-shm")


def fault(path: Path, stopping: Callable[[], bool] = lambda: False) -> str | None:
    """Reason why the store cannot be used; None where it can, or is not there. Reads all pages, and the rows of all
    small tables.

    Raises JobError when ``stopping`` returned True before that.
    """
    if _rebuilt(path).exists():
        return "making it again was interrupted"
    if not path.is_file():
        return None
    engine = open_read_only(path, stopping)
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            return _damaged_row(connection) if found == "ok" else " ".join(str(found).split())
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            raise JobError(f"asked to stop while {path} was checked for damage") from error
        return reason(error) if is_damage(error) else None  # the store itself waits for a lock, and reports the rest
    finally:
        engine.dispose()


def _damaged_row(connection: Connection) -> str | None:
    there = {str(name) for (name,) in connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in METADATA.sorted_tables:
        if table in LARGE or table.name not in there or CHECKSUM not in table.c:
            continue
        if not all(is_intact(table, row) for row in connection.execute(select(table)).mappings()):
            return f"a row of {table.name} is not as it was written, its checksum differs"
    return None


def rebuild(path: Path, stopping: Callable[[], bool] = lambda: False) -> Path:
    """Put a new store with all rows that can be read at ``path``; returns where the damaged one is. Repeat it where it
    was cut off.

    Raises JobError when ``stopping`` returned True before all rows were copied; the damaged store is where it was.
    """
    rebuilt, aside = _rebuilt(path), _aside(path)
    if not rebuilt.exists():
        new = path.with_name(f"{path.name}.new")
        _remove(new)
        _remove(aside)  # a log whose file is gone
        padded = _padded(path)
        try:
            _copy(padded or path, new, stopping)
        finally:
            if padded is not None:
                _remove(padded)
        if Path(f"{new}-wal").exists():
            raise JobError(
                f"{new} could not be closed: rows are left in its log {new}-wal; {path} is as it was. Start again"
            )
        os.replace(new, rebuilt)
    for name in reversed(_FILES):  # SQLite looks for the log under the name of its file
        if (file := Path(f"{path}{name}")).exists():
            os.replace(file, f"{aside}{name}")
    os.replace(rebuilt, path)
    sync_folder(path.parent)
    return aside


def _aside(path: Path) -> Path:
    """The name for the damaged file: of an earlier damage none is replaced. Where the file was moved already, its
    name."""
    names = (
        path.with_name(f"{path.name}.damaged{number}")
        for number in itertools.chain([""], (f"_{n}" for n in itertools.count(2)))
    )
    if path.exists():
        return next(name for name in names if not name.exists())
    return list(itertools.takewhile(lambda name: name.exists(), names))[-1]


def _padded(path: Path) -> Path | None:
    """A copy with zeros for the pages that a shortened file lacks: without them SQLite reads no page at all. None where
    none lack."""
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0") or header[24:28] != header[92:96]:
        return None  # no header, or one whose number of pages SQLite does not use
    page = int.from_bytes(header[16:18])
    size = int.from_bytes(header[28:32]) * (65536 if page == 1 else page)
    if size <= path.stat().st_size:
        return None
    padded = path.with_name(f"{path.name}.padded")
    _remove(padded)
    for name in ("", "-wal"):
        if (file_ := Path(f"{path}{name}")).exists():
            shutil.copyfile(file_, f"{padded}{name}")
    os.truncate(padded, size)
    return padded


def _remove(database: Path) -> None:
    for name in _FILES:
        Path(f"{database}{name}").unlink(missing_ok=True)


def _rebuilt(path: Path) -> Path:
    return path.with_name(f"{path.name}.rebuilt")


def _copy(path: Path, new: Path, stopping: Callable[[], bool]) -> None:
    """All rows of ``path`` that are as they were written, but of no rollout a part."""
    database = Transactions(f"sqlite:///{new}", None, 0.0)
    old = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
    old.text_factory = lambda text: text.decode(errors="replace")  # a checksum shows it
    old.row_factory = sqlite3.Row
    try:
        for table in METADATA.sorted_tables:
            for rows in _batches(old, table):
                if stopping():
                    raise JobError(f"asked to stop while the damaged store {path} was made again")
                database.write(lambda connection, again, table=table, rows=rows: _insert(connection, table, rows))  # type: ignore[misc]
        database.write(lambda connection, again: delete_rollouts(connection, _incomplete(connection)))
        database.sync()
    finally:
        old.close()
        database.close()


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    connection.execute(insert(table).prefix_with("OR REPLACE"), rows)


def _batches(old: sqlite3.Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    columns, batch = [column.name for column in table.c], []
    for row in _readable(old, table):
        if is_intact(table, row):
            batch.append({name: row[name] for name in columns})
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _readable(old: sqlite3.Connection, table: Table) -> Iterator[dict[str, Any]]:
    """Rows up to the first page that cannot be read, then those after the last one."""
    last = -1
    for order in ("ASC", "DESC"):
        try:
            for row in old.execute(
                f"SELECT rowid AS rowid_, * FROM {table.name} WHERE rowid > ? ORDER BY rowid {order}", (last,)
            ):
                last = row["rowid_"] if order == "ASC" else last
                yield dict(row)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", "").startswith(SQLITE_LOCKED):
                raise  # its rows are there
            continue
        return


def _incomplete(connection: Connection) -> list[str]:
    """Rollouts of which not all groups and trajectories are there."""

    def counts(query: Any) -> dict[str, int]:
        return {rollout_id: count for rollout_id, count in connection.execute(query.group_by("rollout_id"))}

    groups = counts(select(GROUPS.c.rollout_id, func.count()).where(GROUPS.c.state.in_(WHOLE)))
    members = counts(select(TRAJECTORIES.c.rollout_id, func.count()).where(TRAJECTORIES.c.index != GREEDY))
    return [
        row.rollout_id
        for row in connection.execute(select(ROLLOUTS))
        if groups.get(row.rollout_id) != row.num_groups
        or members.get(row.rollout_id) != row.num_groups * row.group_size
    ]
