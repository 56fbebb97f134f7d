"""A run's SQLite store that is damaged: set aside before a job reads it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError

from megarl.core.config import Config
from megarl.core.errors import JobError
from megarl.explore.store import Store, sqlite_file
from megarl.explore.store.database import is_pending, open_read_only, reason
from megarl.explore.store.transactions import is_damage

log = logging.getLogger(__name__)


def replace_damaged_store(config: Config, *, rename: bool = True, stopping: Callable[[], bool] = lambda: False) -> None:
    """Put a new SQLite store in the place of a damaged one, with the steps of the run's ``metrics.jsonl``, and warn;
    the damaged file is kept. Without ``rename`` there is only the warning.

    SQLite comes through kills and power cuts by itself. So this is for disks that lose pages, and saves no rows: a run
    goes on from its checkpoint, which holds all that training needs.

    Raises:
        ConfigError: ``store.url`` cannot be read.
        JobError: ``stopping`` returned True before all pages were read.
    """
    if is_pending(config.store.url):
        return
    path = sqlite_file(config.store.url)
    steps = _written(Path(config.run.dir) / "metrics.jsonl")
    if path is None or (found := fault(path, stopping, used=bool(steps))) is None:
        return
    if not rename:
        log.warning("the store %s is damaged: %s; the next start sets it aside", path, found)
        return
    aside = _set_aside(path)
    store = Store(config.store.url)
    for step, metrics in steps.items():
        store.record_step(step, metrics)
    store.close()
    log.warning(
        "THE STORE %s WAS DAMAGED: %s. It is now %s, and a new one has the %d steps of metrics.jsonl. Answers of these "
        "steps are missing in the report, and taskset.order=prioritized begins again; training loses nothing, since it "
        "goes on from a checkpoint.",
        path,
        found,
        aside,
        len(steps),
    )


def fault(path: Path, stopping: Callable[[], bool] = lambda: False, *, used: bool = False) -> str | None:
    """Reason why the store cannot be used; None where it can, or is not there. Reads all pages.

    Args:
        used: The run has steps. Before the first one a killed start leaves a file of 0 bytes.

    Raises JobError when ``stopping`` returned True before that.
    """
    if not path.is_file():
        return None
    if path.stat().st_size == 0:
        return "it has 0 bytes" if used else None
    engine = open_read_only(path, stopping)
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            return None if found == "ok" else " ".join(str(found).split())
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            raise JobError(f"asked to stop while {path} was checked for damage") from error
        return reason(error) if is_damage(error) else None  # the store itself waits for a lock, and reports the rest
    finally:
        engine.dispose()


def _set_aside(path: Path) -> Path:
    """Rename the damaged file and its log; that of an earlier damage is not replaced."""
    names = (path.with_name(f"{path.name}.damaged{number}") for number in ("", *(f"_{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not name.exists())
    for name in ("-shm", "-wal", ""):  # SQLite looks for the log under the name of its file
        if (file := Path(f"{path}{name}")).exists():
            os.replace(file, f"{aside}{name}")
    return aside


def _written(metrics: Path) -> dict[int, dict[str, Any]]:
    """Steps of training and what was measured; a repeated one as it was the last time."""
    found: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.is_file() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half a line, of a process that was killed
        step = record.pop("step", None) if isinstance(record, dict) else None
        if type(step) is int and record.get("training/global_step") == step:
            found[step] = record
    return found
