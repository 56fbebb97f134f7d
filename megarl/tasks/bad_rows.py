"""Rows that ``taskset.bad_rows=drop`` leaves out, by their task's id.

The start of a run finds them and records them in ``RUN/bad_rows.json``. Trainer ranks leave out the recorded ones, so
they have the rows that the start has checked, after a resume too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.taskset import TasksetConfig
from megarl.core.durable import whole
from megarl.core.errors import DataError
from megarl.tasks.row_files import RowLocation

FILE = "bad_rows.json"
FIX = "fix the row, or leave out all such rows (taskset.bad_rows=drop)"
WHOLE = "expert"
"""Split with rows imported all or none."""

Faults = MutableMapping[str, str]
"""Task id -> error of a row that is left out."""
Row = TypeVar("Row")


def sound_rows(
    path: Path,
    prefix: str,
    rows: Sequence[Mapping[str, Any]],
    read: Callable[[RowLocation, str, Mapping[str, Any]], Row],
    skipped: Collection[str] = (),
    faults: Faults | None = None,
) -> list[Row]:
    """Read the rows of a file.

    Args:
        prefix: Begins a task's id, before ``/`` and the row's number.
        read: Reads one row. Raises DataError for a bad one.
        skipped: Ids of rows that are left out unread.
        faults: Is given the bad rows; None refuses them.

    Raises:
        DataError: a row is bad and may not be left out; or all are left out.
    """
    found: list[Row] = []
    first = ""
    for number, row in enumerate(rows):
        task_id = f"{prefix}/{number}"
        if task_id in skipped:
            continue
        try:
            found.append(read(RowLocation(path, number), task_id, row))
        except DataError as error:
            if faults is None:
                raise DataError(f"{error}; {_fix(prefix, bool(skipped))}") from error
            first = first or str(error)
            faults[task_id] = str(error)
    if not found:
        raise DataError(f"{path}: taskset.bad_rows=drop leaves none of the {len(rows)} rows; the first is {first}")
    return found


def _fix(prefix: str, goes_on: bool) -> str:
    """Name the fix of a bad row that may not be left out."""
    if prefix.partition("/")[0] == WHOLE:
        return "fix the row, or drop it"
    return "fix the row, which was sound at the run's start" if goes_on else FIX


def record(run_dir: Path, faults: Mapping[str, Mapping[str, str]]) -> None:
    """Record the bad rows of each split. Raises DataError if the file cannot be written."""
    path = run_dir / FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with whole(path) as temporary:
            Path(temporary).write_text(json.dumps({split: sorted(found) for split, found in faults.items()}))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); make room, or set another run.dir"
        ) from error


def recorded(taskset: TasksetConfig, run_dir: Path) -> dict[str, frozenset[str]]:
    """Return split -> ids of bad rows left out at the start of a run; none with ``taskset.bad_rows=refuse``."""
    if taskset.bad_rows == "refuse":
        return {}
    try:
        text = (run_dir / FILE).read_text()
    except FileNotFoundError:
        return {}
    return {split: frozenset(found) for split, found in json.loads(text).items()}
