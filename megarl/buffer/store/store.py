"""Tasks, expert experiences, rollouts, groups and trajectories in one SQL store.

The trainer requests a rollout (one group per task); explorers claim groups and put each back whole, in one transaction;
the trainer takes ready groups and commits their use with its step. A claim carries a token. Only a group's *current*
claim may put it, so trajectories are written once even if explorers die.

Every write is one transaction, fenced by the job's attempt and retried when the connection is lost
(``transactions.py``); each docstring explains why it is safe to repeat. SQLite runs in WAL mode with
``synchronous=NORMAL``: killing any process loses no committed transaction. A power cut may lose transactions since the
last ``sync``, which precedes every checkpoint's manifest. WAL needs a local file system.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, delete, insert, select

from megarl.buffer.store.claims import SegmentTable, images_of
from megarl.buffer.store.codec import stored_task, task_from_row, task_to_row
from megarl.buffer.store.engines import EngineTable, WorkerTable
from megarl.buffer.store.experts import ExpertTable
from megarl.buffer.store.groups import GroupTable
from megarl.buffer.store.journal import Journal, PacingTable, ReplayTable
from megarl.buffer.store.late import LateRewards
from megarl.buffer.store.rollouts import EvaluationTable, RolloutTable
from megarl.buffer.store.row_facts import FactTable
from megarl.buffer.store.selection import SelectionTable
from megarl.buffer.store.tables import GROUPS, TASK_IMAGES, TASKS
from megarl.buffer.store.transactions import Transactions
from megarl.core.errors import DataError
from megarl.core.jobs import TRAIN
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


class Store:
    """A process's connection to the store, a part for each kind of row. Make a new one after a fork.

    Args:
        url: ``store.url``, or SQLAlchemy's for sqlite or postgresql.
        attempt: Attempt of this process's job. Every write raises FencedError once another attempt has begun. None
            (reports, tools) writes in any attempt.
        outage_s: Seconds of retries of an unreachable database; 0 fails immediately.
        read_only: Do not change a SQLite file or create tables.
        has_tables: Another process has created the tables; the first call then opens the connection.
        program: Program of this process's job; attempts are counted per program.
        outlives: This process goes on when trainer ranks alone start again, as another attempt.

    Raises:
        ConfigError: the URL cannot be read or its driver is missing.
        JobError: (here, and every method of a part) the database could not be used for ``outage_s``.
        StoreDamagedError: (here, and every method of a part) a page or a row cannot be read.
        FencedError: (here, and every write of a part) the job has begun another attempt.
    """

    def __init__(
        self,
        url: str,
        *,
        attempt: int | None = None,
        outage_s: float = 0.0,
        read_only: bool = False,
        has_tables: bool = False,
        program: str = TRAIN,
        outlives: bool = False,
    ) -> None:
        self.database = database = Transactions(
            url, attempt, outage_s, read_only=read_only, has_tables=has_tables, program=program, outlives=outlives
        )
        """Transactions of this process, for queries without a table method."""
        self.program = program
        self.tasks = TaskTable(database)
        self.experts = ExpertTable(database)
        self.rollouts = RolloutTable(database)
        self.segments = SegmentTable(database)
        self.groups = GroupTable(database, self.segments)
        self.evaluations = EvaluationTable(database)
        self.late = LateRewards(database, self.groups)
        self.pacing = PacingTable(database)
        self.replays = ReplayTable(database)
        self.selection = SelectionTable(database)
        self.engines = EngineTable(database)
        self.workers = WorkerTable(database)
        self.journal = Journal(database)
        self.facts = FactTable(database)

    def close(self) -> None:
        """Close this process's connections."""
        self.database.close()

    def begin_attempt(self, attempt: int, keeps: int | None = None) -> None:
        """Begin an attempt, before any of its processes starts: processes of earlier attempts can no longer write. This
        handle belongs to the new attempt. Safe to repeat, see :meth:`Transactions.begin_attempt`.

        ``keeps``: Oldest attempt of processes that outlive it and may still write; None keeps none.

        Raises FencedError when the stored attempt is not smaller.
        """
        self.database.begin_attempt(attempt, keeps)

    def sync(self) -> None:
        """Sync to disk every commit of all processes so far, so that it survives a power cut. Safe to repeat."""
        self.database.sync()
