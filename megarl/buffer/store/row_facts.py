"""Facts of the store, read by queries of their own: checks compare with them what other queries gave to a step."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import bindparam, func, select

from megarl.buffer.store.codec import task_from_row
from megarl.buffer.store.tables import GROUPS, ROLLOUTS, STEPS, TASKS, TRAJECTORIES, VERSIONS
from megarl.buffer.store.transactions import Transactions
from megarl.core.schema import GREEDY, Task

TASKS_NAMED = select(TASKS).where(TASKS.c.task_id.in_(bindparam("ids", expanding=True)))
"""Tasks by id. Made once, because SQLAlchemy takes longer to build the query than SQLite to answer it."""


class GroupFacts(NamedTuple):
    """A group's row."""

    group_id: str
    rollout_id: str
    position: int
    task_id: str
    used_by: int | None
    """Number of the step, from 1, that has used it; None before."""


class FactTable:
    """Queries of checks. Their time is that of a few rows."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def tasks(self, task_ids: Collection[str]) -> dict[str, Task]:
        """Return tasks by id, without images."""
        given = {"ids": list(task_ids)}
        rows = self._database.read(lambda connection: connection.execute(TASKS_NAMED, given).all())
        return {row.task_id: task_from_row(row) for row in rows}

    def task_order(self) -> list[str]:
        """Return the ids of the training tasks in the order of the file."""
        query = select(TASKS.c.task_id, TASKS.c.position).where(TASKS.c.split == "train")
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [row.task_id for row in sorted(rows, key=lambda row: int(row.position))]

    def groups(self, rollout_ids: Collection[str]) -> list[GroupFacts]:
        """Return the groups of rollouts, in the order of their positions."""
        columns = (GROUPS.c.group_id, GROUPS.c.rollout_id, GROUPS.c.position, GROUPS.c.task_id, GROUPS.c.used_by)
        query = select(*columns).where(GROUPS.c.rollout_id.in_(list(rollout_ids)))
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return sorted((GroupFacts(*row) for row in rows), key=lambda group: (group.rollout_id, group.position))

    def steps_of_versions(self, versions: Collection[str]) -> dict[str, int]:
        """Return the number of training steps of each version, without versions that were never published."""
        query = select(VERSIONS.c.version, VERSIONS.c.step).where(VERSIONS.c.version.in_(list(versions)))
        return {row.version: row.step for row in self._database.read(lambda c: c.execute(query).all())}

    def seeds(self, after: int) -> list[tuple[int, str, int | None]]:
        """Return (sequence, id, sampling seed) of the training rollouts with a larger sequence than ``after``."""
        query = select(ROLLOUTS.c.sequence, ROLLOUTS.c.rollout_id, ROLLOUTS.c.sampling)
        query = query.where(ROLLOUTS.c.kind == "train", ROLLOUTS.c.sequence > after).order_by(ROLLOUTS.c.sequence)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [(row.sequence, row.rollout_id, json.loads(row.sampling).get("seed")) for row in rows]

    def right_shares(self, after: int, until: int) -> dict[str, float]:
        """Return task id -> share of right responses in the task's newest training group that steps ``after`` + 1 to
        ``until`` have used; responses without a verdict do not count."""
        order = (GROUPS.c.used_by, ROLLOUTS.c.sequence, GROUPS.c.position)
        query = (
            select(GROUPS.c.group_id, GROUPS.c.task_id, TRAJECTORIES.c.status, *order)
            .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            .join(TRAJECTORIES, TRAJECTORIES.c.group_id == GROUPS.c.group_id)
            .where(GROUPS.c.used_by > after, GROUPS.c.used_by <= until, ROLLOUTS.c.kind == "train")
            .where(TRAJECTORIES.c.index != GREEDY)
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        of_groups: dict[tuple[str, str], list[bool]] = {}
        for row in sorted(rows, key=lambda row: (row.used_by, row.sequence, row.position)):
            if row.status in ("ok", "wrong"):
                of_groups.setdefault((row.task_id, row.group_id), []).append(row.status == "ok")
        return {task: sum(right) / len(right) for (task, _), right in of_groups.items()}

    def last_step(self) -> int:
        """Return the number of the last step that was recorded; 0 before the first."""
        return self._database.read(lambda connection: connection.scalar(select(func.max(STEPS.c.step)))) or 0
