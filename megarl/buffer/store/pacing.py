"""Published weights, unused training groups, and consumed groups with their replays."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import ColumnElement, case, func, select, update

from megarl.buffer.store.tables import GROUPS, OPEN, REPLAYS, ROLLOUTS, TRAJECTORIES, VERSIONS, GroupState, chunks
from megarl.buffer.store.transactions import Transactions, put
from megarl.core.schema import GREEDY, WeightsVersion


class UnusedGroup(NamedTuple):
    """A training group not used by any step."""

    group_id: str
    rollout_id: str
    weights_step: int
    """Steps in the last published weights at its request."""
    ready: bool
    awaiting: bool
    """True if its rewards arrive later."""


class PacingTable:
    """Published versions and unused groups."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def record_version(self, version: WeightsVersion, step: int) -> None:
        """Record that ``version`` has ``step`` steps of training, before any engine loads it. Safe to repeat."""
        row = {
            "version": str(version),
            "attempt": version.attempt,
            "n": version.n,
            "step": step,
            "published_at": time.time(),
            "live": 0,
        }
        self._database.write(lambda connection, again: put(connection, VERSIONS, [row]))

    def record_live(self, version: WeightsVersion) -> None:
        """Record that every engine has proven to have ``version``. Safe to repeat."""
        live = update(VERSIONS).where(VERSIONS.c.version == str(version)).values(live=1)
        self._database.write(lambda connection, again: connection.execute(live))

    def live_step(self) -> int | None:
        """Return the training steps in the last weights that engines proved to have; None before any."""
        query = (
            select(VERSIONS.c.step).where(VERSIONS.c.live == 1).order_by(VERSIONS.c.attempt.desc(), VERSIONS.c.n.desc())
        )
        return self._database.read(lambda connection: connection.scalar(query.limit(1)))

    def version_steps(self, versions: Collection[WeightsVersion]) -> dict[WeightsVersion, int]:
        """Return version -> training steps, for the published ones of ``versions``."""
        found: dict[WeightsVersion, int] = {}
        for few in chunks([str(version) for version in versions]):
            query = select(VERSIONS.c.version, VERSIONS.c.step).where(VERSIONS.c.version.in_(few))
            rows = self._database.read(lambda connection, query=query: connection.execute(query).all())  # type: ignore[misc]
            found |= {WeightsVersion.parse(row.version): row.step for row in rows}
        return found

    def unused(self) -> list[UnusedGroup]:
        """Return unused training groups: first those with stored trajectories, in the order in which they ended."""
        columns = (GROUPS.c.group_id, GROUPS.c.rollout_id, steps_of_weights().label("step"), GROUPS.c.state)
        query = (
            select(*columns, GROUPS.c.ended_at)
            .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            .where(GROUPS.c.state.in_(OPEN), ROLLOUTS.c.kind == "train")
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        there = [row for row in rows if row.ended_at is not None]
        there.sort(key=lambda row: (row.ended_at, row.group_id))
        others = [row for row in rows if row.ended_at is None]
        return [
            UnusedGroup(row.group_id, row.rollout_id, row.step, *(row.state == state for state in OPEN[:1:-1]))
            for row in (*there, *others)
        ]

    def num_asked(self) -> tuple[int | None, int]:
        """Return (steps done at the first request of training groups, or None; number requested since, without
        replacements). A store that replaced a damaged one begins in the middle of the run."""
        asked = (ROLLOUTS.c.kind == "train", ROLLOUTS.c.rollout_id.not_like("train-%-%"))
        query = select(func.min(ROLLOUTS.c.step), func.coalesce(func.sum(ROLLOUTS.c.num_groups), 0)).where(*asked)
        first, number = self._database.read(lambda connection: connection.execute(query).one())
        return first, int(number)


def steps_of_weights() -> ColumnElement[int]:
    """Return the SQL for the steps in a rollout's weights, or the steps done at its request if the version is not
    recorded."""
    published = select(VERSIONS.c.step).where(VERSIONS.c.version == ROLLOUTS.c.version).scalar_subquery()
    return func.coalesce(published, ROLLOUTS.c.step)


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
