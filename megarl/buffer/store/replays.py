"""Consumed groups, for steps that train on them again."""

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
    """Share of right responses; those without a verdict count as wrong."""


class ReplayTable:
    """Which groups steps have trained on, the first time and again."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def consumed(self, after: int, until: int) -> list[UsedGroup]:
        """Return the training groups that the steps ``after`` + 1 to ``until`` were the first to train on, in an order
        that no resume changes."""
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
        return sorted(UsedGroup(*row) for row in rows)  # not by a database's collation

    def counts(self, after: int, until: int) -> dict[str, int]:
        """Group id -> number of the steps ``after`` + 1 to ``until`` that have trained on it again."""
        query = select(REPLAYS.c.group_id, func.count()).where(REPLAYS.c.step > after, REPLAYS.c.step <= until)
        rows = self._database.read(lambda connection: connection.execute(query.group_by(REPLAYS.c.group_id)).all())
        return {row[0]: int(row[1]) for row in rows}
