"""Tasks, expert experiences, rollouts, groups and trajectories in one SQL database.

The trainer asks for a rollout (one group per task); explorers claim groups and put each back whole, in one
transaction; the trainer takes what is ready, and commits what it has used with its step. A claim carries a token.
Only the claim that a group has *now* may put it, so whatever happens to explorers, trajectories are written once.

Every write is one transaction, fenced by the job's attempt and repeated when the connection was lost
(``transactions.py``); each docstring explains why a repetition does no harm. SQLite runs in WAL mode with
``synchronous=NORMAL``: killing any process loses no committed transaction. A power cut may lose those since the last
``sync``, which comes before every checkpoint's manifest. WAL needs a local file system.
"""

from __future__ import annotations

from megarl.explore.store.engines import EngineRegistry
from megarl.explore.store.evaluations import EvaluationTable
from megarl.explore.store.experts import ExpertTable
from megarl.explore.store.journal import Journal
from megarl.explore.store.late import LateRewards
from megarl.explore.store.pacing import PacingTable
from megarl.explore.store.replays import ReplayTable
from megarl.explore.store.rollouts import RolloutTable
from megarl.explore.store.selection import SelectionTable
from megarl.explore.store.tasks import TaskTable
from megarl.explore.store.workers import WorkerTable


class Store(
    TaskTable,
    ExpertTable,
    RolloutTable,
    EvaluationTable,
    LateRewards,
    PacingTable,
    ReplayTable,
    SelectionTable,
    EngineRegistry,
    WorkerTable,
    Journal,
):
    """A connection to the store, for one process (make a new one after a fork).

    Args:
        url: ``store.url``, or SQLAlchemy's for sqlite or postgresql.
        attempt: Of the job that this process belongs to. Every write raises FencedError once another one has begun.
            None (reports, tools) writes whatever attempt there is.
        outage_s: How long a database that does not answer is waited for; 0 fails at once.
        program: Of the job that this process belongs to; attempts of another program are not its own.
        has_tables: Another process has made the tables. Then nothing connects before the first call.

    Raises:
        ConfigError: the URL cannot be read or its driver is missing.
        JobError: (here, and every method) the database could not be used for ``outage_s``.
        StoreDamagedError: (here, and every method) a page or a row cannot be read.
        FencedError: (here, and every write) the job has begun another attempt.
    """
