"""Replacement of a run's damaged or lost store by a new one with the steps of the run so far."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from megarl.buffer.store import Store, sqlite_file
from megarl.buffer.store.database import is_pending, open_read_only, reason, sync_folder
from megarl.buffer.store.tables import EVENTS, EXCLUDED, GROUPS, JOB, REPLAYS, ROLLOUTS, STEPS, TASKS
from megarl.buffer.store.transactions import is_damage
from megarl.config import Config
from megarl.core.errors import JobError
from megarl.run.postgres import Server
from megarl.weights.checkpoint.training.remote_folder import FETCHED
from megarl.weights.checkpoint.training.state import latest, read_state

log = logging.getLogger(__name__)

SMALL = (JOB, STEPS, EVENTS, ROLLOUTS, GROUPS, REPLAYS, EXCLUDED, TASKS)
JSON_COLUMNS = {"metrics", "data", "sampling", "prompt", "reward_model", "extra_info"}
_FILES = ("", "-wal", "-shm")
EMPTY = "it has 0 bytes"
LACKS = (
    "Answers of these steps are missing in the report, and taskset.order=prioritized begins again; expert rows that "
    "were imported by hand have to be imported again; training loses nothing else, since it goes on from a checkpoint."
)
"""Warning about a new store's contents."""


def replace_damaged_store(config: Config, *, rename: bool = True, stopping: Callable[[], bool] = lambda: False) -> None:
    """Replace a damaged SQLite store by a new one with the steps of the run so far, and warn; the damaged file is kept.
    Without ``rename`` only warn. Safe to repeat after a kill.

    SQLite itself survives kills and power cuts, so this is for disks that lose pages. It saves no rows: a run goes on
    from its checkpoint, which has all that training needs. Metrics come from ``metrics.jsonl``; steps of a checkpoint
    that are missing there have none.

    Raises:
        ConfigError: ``store.url`` cannot be read.
        JobError: ``stopping`` returned True before all pages were read; or the new file cannot be written.
    """
    if is_pending(config.store.url):
        return
    path, run_dir = sqlite_file(config.store.url), Path(config.run.dir)
    if path is None or (found := fault(path, stopping)) is None:
        return
    steps = _written(run_dir / "metrics.jsonl")
    if found == EMPTY and not steps:
        return  # file of a start that was killed before the first step
    if not rename:
        log.warning("the store %s is damaged: %s; the next start sets it aside", path, found)
        return
    aside = replace_store(path, _with_steps_behind(steps, run_dir))
    log.warning(
        "THE STORE %s WAS DAMAGED: %s. It is now %s, and a new one has the %d steps of metrics.jsonl. %s",
        path,
        found,
        aside,
        len(steps),
        LACKS,
    )


def fill_lost_store(config: Config, server: Server) -> None:
    """Add the steps of the run so far to a new store that replaces lost data or data on another host, and warn. Safe to
    repeat after a kill."""
    if not (lost := server.parking.lost):
        return
    run_dir = Path(config.run.dir)
    steps = _written(run_dir / "metrics.jsonl")
    store = Store(config.store.url, outage_s=config.store.outage_s)
    store.journal.record_steps(_with_steps_behind(steps, run_dir))
    store.close()
    server.parking.settle()
    log.warning(
        "THE STORE'S DATA WERE NOT PARKED in %s: %s. A new store has the %d steps of metrics.jsonl. %s",
        server.folder,
        lost,
        len(steps),
        LACKS,
    )


def fill_store_of_fetched(config: Config) -> None:
    """Add the missing steps before a checkpoint that was fetched from ``trainer.remote`` to the run's store. Safe to
    repeat after a kill."""
    run_dir = Path(config.run.dir)
    if not (run_dir / FETCHED).is_file():
        return
    store = Store(config.store.url, outage_s=config.store.outage_s)
    try:
        there = {step for step, _ in store.journal.steps()}
        steps = _with_steps_behind(_written(run_dir / "metrics.jsonl"), run_dir)
        if missing := {step: metrics for step, metrics in steps.items() if step not in there}:
            store.journal.record_steps(missing)
            log.warning("the store has %d steps of metrics.jsonl now. %s", len(missing), LACKS)
    finally:
        store.close()
    (run_dir / FETCHED).unlink()


def _with_steps_behind(steps: Mapping[int, dict[str, Any]], run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return ``steps``, and the missing steps up to the newest checkpoint without metrics."""
    newest = latest(run_dir / "checkpoints")
    behind = 0 if newest is None else int(read_state(newest)["step"])
    return dict.fromkeys(range(1, behind + 1), dict[str, Any]()) | dict(steps)


def fault(path: Path, stopping: Callable[[], bool] = lambda: False) -> str | None:
    """Return the reason why the store cannot be used; None if it can, or does not exist. Reads all pages, and the rows
    that a start needs.

    Raises JobError if ``stopping`` returned True before the end.
    """
    if _rebuilt(path).exists():
        return "putting a new one in its place was interrupted"
    if not path.is_file():
        return None
    if path.stat().st_size == 0:
        return EMPTY
    engine = open_read_only(path, stopping)
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            return _unreadable(connection) if found == "ok" else " ".join(str(found).split())
    except ValueError as error:
        return f"a row is no JSON ({error})"
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            raise JobError(f"asked to stop while {path} was checked for damage") from error
        return reason(error) if is_damage(error) else None  # Store waits for locks and reports other errors
    finally:
        engine.dispose()


def _unreadable(connection: Connection) -> str | None:
    """Return a fault in the rows that every start reads; None without one. Raises DBAPIError, or ValueError for invalid
    JSON."""
    there = {str(name) for (name,) in connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in SMALL:
        for row in connection.execute(select(table)).mappings() if table.name in there else ():
            for column in JSON_COLUMNS & row.keys():
                json.loads(row[column])
            if table is JOB and row["key"].startswith("attempt/") and not row["value"].partition(" ")[0].isdecimal():
                return f"an attempt has no number: {row['value']!r}"
    return None


def replace_store(path: Path, steps: Mapping[int, Mapping[str, Any]]) -> Path:
    """Put a complete new store with these steps at ``path``; return the damaged one's new path.

    A kill leaves only the damaged file, or the complete new one as ``.rebuilt``; the next call goes on from there.
    """
    rebuilt = _rebuilt(path)
    if not rebuilt.exists():
        new = path.with_name(f"{path.name}.new")
        for name in _FILES:
            Path(f"{new}{name}").unlink(missing_ok=True)
        store = Store(f"sqlite:///{new}")
        store.journal.record_steps(steps)
        store.sync()
        store.close()
        os.replace(new, rebuilt)
        sync_folder(path.parent)
    names = [path.with_name(f"{path.name}.damaged{number}") for number in ("", *(f"_{n}" for n in range(2, 1000)))]
    taken = sum(name.exists() for name in names)
    aside = names[taken if path.exists() else max(taken - 1, 0)]  # if ``path`` is missing, it was moved before a kill
    for name in reversed(_FILES):  # SQLite finds the log by the name of its file
        if (file := Path(f"{path}{name}")).exists():
            os.replace(file, f"{aside}{name}")
    os.replace(rebuilt, path)
    sync_folder(path.parent)
    return aside


def _rebuilt(path: Path) -> Path:
    return path.with_name(f"{path.name}.rebuilt")


def _written(metrics: Path) -> dict[int, dict[str, Any]]:
    """Return step -> metrics of training; a repeated step has its last metrics."""
    found: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.is_file() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # incomplete line of a killed process
        step = record.pop("step", None) if isinstance(record, dict) else None
        if type(step) is int and record.get("training/global_step") == step:
            found[step] = record
    return found
