"""Tasks, expert experiences, rollouts, groups and trajectories in one SQL database.

The trainer requests a rollout (one group per task); explorers claim groups and put each back whole, in one transaction;
the trainer takes ready groups and commits their use with its step. A claim carries a token. Only a group's *current*
claim may put it, so trajectories are written once even if explorers die.

Every write is one transaction, fenced by the job's attempt and retried when the connection is lost
(``transactions.py``); each docstring explains why it is safe to repeat. SQLite runs in WAL mode with
``synchronous=NORMAL``: killing any process loses no committed transaction. A power cut may lose transactions since the
last ``sync``, which precedes every checkpoint's manifest. WAL needs a local file system.
"""

from __future__ import annotations

from megarl.buffer.store.engines import EngineTable, WorkerTable
from megarl.buffer.store.experts import ExpertTable
from megarl.buffer.store.groups import GroupTable
from megarl.buffer.store.journal import Journal
from megarl.buffer.store.late import LateRewards
from megarl.buffer.store.pacing import PacingTable, ReplayTable
from megarl.buffer.store.rollouts import EvaluationTable, RolloutTable
from megarl.buffer.store.segments import SegmentTable
from megarl.buffer.store.selection import SelectionTable
from megarl.buffer.store.tasks import TaskTable
from megarl.buffer.store.transactions import Transactions
from megarl.core.jobs import TRAIN


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
    ) -> None:
        self.database = database = Transactions(
            url, attempt, outage_s, read_only=read_only, has_tables=has_tables, program=program
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

    def close(self) -> None:
        """Close this process's connections."""
        self.database.close()

    def begin_attempt(self, attempt: int) -> None:
        """Begin an attempt, before any of its processes starts: processes of earlier attempts can no longer write. This
        handle belongs to the new attempt. Safe to repeat, see :meth:`Transactions.begin_attempt`.

        Raises FencedError when the stored attempt is not smaller.
        """
        self.database.begin_attempt(attempt)

    def sync(self) -> None:
        """Sync to disk every commit of all processes so far, so that it survives a power cut. Safe to repeat."""
        self.database.sync()
