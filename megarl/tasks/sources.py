"""Files of a split's tasks. ``taskset.train`` is one file, or several with names and weights.

A task's id has its source's name and its row: ``train/12``, or ``train/gsm8k/12``, counted from 0 in each file.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.config.taskset import SourceConfig, TasksetConfig
from megarl.core.errors import DataError
from megarl.core.schema import Preference, Task
from megarl.tasks.bad_rows import Faults
from megarl.tasks.row_files import place_of
from megarl.tasks.rows import read_rows


def sources_of(taskset: TasksetConfig, split: str) -> dict[str, SourceConfig]:
    """Name -> source of train or eval, in the order of the settings; the name of a single file is empty."""
    given: str | dict[str, SourceConfig] = getattr(taskset, split)
    found = {"": SourceConfig(given)} if isinstance(given, str) else given
    return {
        name: replace(
            source, columns=source.columns or taskset.columns, data_source=source.data_source or taskset.data_source
        )
        for name, source in found.items()
    }


def source_of(task_id: str) -> str:
    """Return the name of a task's source; empty for a single file."""
    parts = task_id.split("/")
    return parts[1] if len(parts) > 2 else ""


def read_tasks(
    taskset: TasksetConfig, split: str, data_source: str | None = None, faults: Faults | None = None
) -> list[Task]:
    """Rows of all sources of train or eval, one source after the other.

    Args:
        data_source: That of rows for which neither the file nor a setting has one; None refuses them.
        faults: Is given the bad rows, which are left out; None refuses them.

    Raises:
        DataError: a row is not sound, with file, row and field.
    """
    return [
        task
        for name, source in sources_of(taskset, split).items()
        for task in read_rows(
            source.path,
            split=f"{split}/{name}" if name else split,
            columns=source.columns,
            data_source=source.data_source or data_source,
            faults=faults,
        )
    ]


def place_of_row(taskset: TasksetConfig, split: str, row: Task | Preference) -> str:
    """Return ``FILE: row N`` of a split's row; N counts from 1."""
    path = getattr(taskset, split)
    if not isinstance(path, str):
        path = path[source_of(row.task_id)].path
    return place_of(path, int(row.task_id.rpartition("/")[2]))


def single_file(taskset: TasksetConfig, split: str) -> str:
    """Return the path of a single-file split. Raises DataError for several files."""
    path = getattr(taskset, split)
    if not isinstance(path, str):
        raise DataError(f"taskset.{split} names several files, and this kind of rows is read from one; give one file")
    return path
