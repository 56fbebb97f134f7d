"""Rows of tasks, by split."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, delete, insert, select

from megarl.buffer.store.claims import images_of
from megarl.buffer.store.codec import stored_task, task_from_row, task_to_row
from megarl.buffer.store.tables import GROUPS, TASK_IMAGES, TASKS
from megarl.buffer.store.transactions import Transactions
from megarl.core.errors import DataError
from megarl.core.schema import Task


class TaskTable:
    """Tasks available to rollouts."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def add(self, split: str, tasks: Sequence[Task]) -> None:
        """Make ``tasks`` the whole of ``split``, in this order. Safe to repeat: the split is written again.

        Raises DataError when a task id occurs twice or belongs to another split, or a text contains a NUL character.
        """
        ids = [task.task_id for task in tasks]
        if len(set(ids)) != len(ids):
            twice = next(task_id for i, task_id in enumerate(ids) if task_id in ids[:i])
            raise DataError(f"task id {twice!r} occurs twice in split {split!r}; ids must be unique")
        rows = [task_to_row(task) | {"split": split, "position": i} for i, task in enumerate(tasks)]

        def work(connection: Connection, again: bool) -> None:
            of_split = select(TASKS.c.task_id).where(TASKS.c.split == split)
            connection.execute(delete(TASK_IMAGES).where(TASK_IMAGES.c.task_id.in_(of_split)))
            connection.execute(delete(TASKS).where(TASKS.c.split == split))
            taken = {row.task_id: row.split for row in connection.execute(select(TASKS.c.task_id, TASKS.c.split))}
            clash = next((task_id for task_id in ids if task_id in taken), None)
            if clash is not None:
                raise DataError(
                    f"task id {clash!r} of split {split!r} belongs to split {taken[clash]!r}; ids must be unique"
                )
            if rows:
                connection.execute(insert(TASKS), rows)
            for task in tasks:  # one at a time: a row's images may take 32 MiB
                for i, image in enumerate(task.images):
                    row = {"task_id": task.task_id, "position": i, "image": image}
                    connection.execute(insert(TASK_IMAGES), row)

        self._database.write(work)

    def ids(self, split: str) -> list[str]:
        """Return the ids of a split's tasks in insertion order."""
        query = select(TASKS.c.task_id).where(TASKS.c.split == split).order_by(TASKS.c.position)
        return self._database.read(lambda connection: list(connection.scalars(query)))

    def changed(self, split: str, tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
        """Return (stored tasks of a split that differ from ``tasks`` or are missing there, those of them with
        groups)."""
        now = {task.task_id: stored_task(task) for task in tasks}
        changed = [task for task in self.read(split) if now.get(task.task_id) != task]
        asked = self._database.read(lambda connection: set(connection.scalars(select(GROUPS.c.task_id).distinct())))
        return changed, [task for task in changed if task.task_id in asked]

    def data_sources(self) -> list[str]:
        """Data sources of the tasks, sorted."""
        query = select(TASKS.c.data_source).distinct().order_by(TASKS.c.data_source)
        return self._database.read(lambda connection: list(connection.scalars(query)))

    def images(self, task_ids: Collection[str]) -> dict[str, tuple[bytes, ...]]:
        """Return task id -> image files in order, for tasks with images."""
        return self._database.read(lambda connection: images_of(connection, task_ids))

    def read(self, split: str, *, images: bool = True) -> list[Task]:
        """Return a split's tasks in insertion order; without ``images`` their images are not read."""

        def work(connection: Connection) -> list[Task]:
            rows = connection.execute(select(TASKS).where(TASKS.c.split == split).order_by(TASKS.c.position)).all()
            found = images_of(connection, select(TASKS.c.task_id).where(TASKS.c.split == split)) if images else {}
            return [task_from_row(row, found.get(row.task_id, ())) for row in rows]

        return self._database.read(work)
