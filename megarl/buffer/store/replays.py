"""Consumed groups and their replays."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import case, func, select

from megarl.buffer.store.tables import GROUPS, REPLAYS, ROLLOUTS, TRAJECTORIES, GroupState
from megarl.buffer.store.transactions import Transactions
from megarl.core.schema import GREEDY


class UsedGroup(NamedTuple):
    """A training group that a step has consumed."""

    rollout_id: str
    position: int
    group_id: str
    used_by: int
    """Number of the first step that has trained on it, from 1."""
    accuracy: float
    """Share of right responses; responses without a verdict count as wrong."""


class ReplayTable:
    """Records of groups that steps trained on, the first time and again."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def consumed(self, after: int, until: int) -> list[UsedGroup]:
        """Return training groups first used by steps ``after`` + 1 to ``until``, in an order that a resume does not
        change."""
        right = func.sum(case((TRAJECTORIES.c.status == "ok", 1.0), else_=0.0))
        columns = (GROUPS.c.rollout_id, GROUPS.c.position, GROUPS.c.group_id, GROUPS.c.used_by)
        query = (
            select(*columns, right / func.count())
            .join(TRAJECTORIES, TRAJECTORIES.c.group_id == GROUPS.c.group_id)
            .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            .where(GROUPS.c.used_by > after, GROUPS.c.used_by <= until, GROUPS.c.state == GroupState.CONSUMED)
            .where(ROLLOUTS.c.kind == "train", TRAJECTORIES.c.index != GREEDY)
            .group_by(*columns)
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return sorted(UsedGroup(*row) for row in rows)  # a database's collation may differ

    def counts(self, after: int, until: int) -> dict[str, int]:
        """Return group id -> number of steps from ``after`` + 1 to ``until`` that replayed it."""
        query = select(REPLAYS.c.group_id, func.count()).where(REPLAYS.c.step > after, REPLAYS.c.step <= until)
        rows = self._database.read(lambda connection: connection.execute(query.group_by(REPLAYS.c.group_id)).all())
        return {row[0]: int(row[1]) for row in rows}
