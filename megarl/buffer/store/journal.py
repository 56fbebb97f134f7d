"""Records of a run: metrics of steps, events, the state of the job, published weights, used and unused groups."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, bindparam, case, delete, func, insert, select, update

from megarl.buffer.store.codec import dumps
from megarl.buffer.store.tables import (
    EVENTS,
    EXCLUDED,
    GROUPS,
    JOB,
    OPEN,
    REPLAYS,
    ROLLOUTS,
    STEPS,
    TRAJECTORIES,
    VERSIONS,
    GroupState,
    chunks,
)
from megarl.buffer.store.transactions import Transactions, put
from megarl.core.schema import GREEDY, WeightsVersion

JobState = Literal["open", "closed"]


class Used(NamedTuple):
    """Groups used by a step, by id."""

    consumed: tuple[str, ...] = ()
    """Groups that the step trained on."""
    dropped: Mapping[str, str] = {}
    """Dropped group -> reason."""
    replayed: tuple[str, ...] = ()
    """Groups of earlier steps that it trained on again."""
    excluded: Mapping[tuple[str, int], str] = {}
    """(group id, index) of a member excluded from a trained group -> reason."""


NOTHING_USED = Used()


class Journal:
    """Steps, events and the state of the job."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def record_step(self, step: int, metrics: Mapping[str, float], used: Used = NOTHING_USED) -> None:
        """Record a step's metrics and mark its used groups, in one transaction.

        Safe to repeat: a repeated step replaces its first record. ``step`` counts from 1.
        """
        row = _step_row(step, metrics)

        def work(connection: Connection, again: bool) -> None:
            put(connection, STEPS, [row])
            mark_used(connection, step, used)

        self._database.write(work)

    def record_steps(self, steps: Mapping[int, Mapping[str, float | None]]) -> None:
        """Record the metrics of many steps in one transaction. Safe to repeat."""
        rows = [_step_row(step, metrics) for step, metrics in steps.items()]
        self._database.write(lambda connection, again: put(connection, STEPS, rows))

    def record_evaluation(self, source: str, rollout_id: str, data: Mapping[str, Any]) -> None:
        """Append the event of an evaluation, and mark its groups consumed, in one transaction.

        Safe to repeat: each rollout is evaluated once.
        """
        ready = (GROUPS.c.rollout_id == rollout_id, GROUPS.c.state == GroupState.READY)
        event = {"at": time.time(), "source": source, "kind": "evaluation", "data": dumps(dict(data))}

        def work(connection: Connection, again: bool) -> None:
            consumed = update(GROUPS).where(*ready).values(state=GroupState.CONSUMED)
            if connection.execute(consumed).rowcount:
                connection.execute(insert(EVENTS), [event])

        self._database.write(work)

    def steps(self) -> list[tuple[int, dict[str, float | None]]]:
        """Recorded (step, metrics) in order; a non-finite metric is None."""
        query = select(STEPS).order_by(STEPS.c.step)
        return self._database.read(
            lambda connection: [(row.step, json.loads(row.metrics)) for row in connection.execute(query)]
        )

    def excluded(self, group_ids: Collection[str]) -> dict[tuple[str, int], str]:
        """Return (group id, index) -> reason for trajectories that steps excluded from these groups."""
        found: dict[tuple[str, int], str] = {}
        for few in chunks(list(group_ids)):
            query = select(EXCLUDED).where(EXCLUDED.c.group_id.in_(few))
            rows = self._database.read(lambda connection, query=query: connection.execute(query).all())  # type: ignore[misc]
            found |= {(row.group_id, row.index): row.reason for row in rows}
        return found

    def last_step(self) -> int:
        """Number of the last recorded step; 0 before the first."""
        return self._database.read(lambda connection: connection.scalar(select(func.max(STEPS.c.step))) or 0)

    def record_event(self, source: str, kind: str, data: Mapping[str, Any]) -> None:
        """Append to the job's log of events (a retry, a restart, a warning).

        Safe to repeat: an event with the same time, source and content counts as this call's.
        """
        event = {"at": time.time(), "source": source, "kind": kind, "data": dumps(dict(data))}
        same = select(EVENTS.c.event_id).where(*(EVENTS.c[name] == value for name, value in event.items()))

        def work(connection: Connection, again: bool) -> None:
            if not (again and connection.execute(same).first()):
                connection.execute(insert(EVENTS), [event])

        self._database.write(work)

    def events(self, kind: str | None = None, after: int = 0) -> list[dict[str, Any]]:
        """Return events in order, after event number ``after``: {number, at (unix seconds), source, kind, data}."""
        query = select(EVENTS).where(EVENTS.c.event_id > after).order_by(EVENTS.c.event_id)
        if kind is not None:
            query = query.where(EVENTS.c.kind == kind)
        return self._database.read(lambda connection: [event_of(row) for row in connection.execute(query)])

    def open_job(self) -> None:
        """Record that work may still be requested. Safe to repeat."""
        self._set_job_state("open")

    def close_job(self) -> None:
        """Record that no further work will be requested; explorers then end. Safe to repeat."""
        self._set_job_state("closed")

    def job_state(self) -> JobState:
        """``open`` until :meth:`close_job`."""
        query = select(JOB.c.value).where(JOB.c.key == "state")
        return self._database.read(lambda connection: connection.scalar(query)) or "open"

    def has_begun(self) -> bool:
        """Return True once a trainer has filled the store and opened the job, in any attempt."""
        query = select(JOB.c.value).where(JOB.c.key == "state")
        return self._database.read(lambda connection: connection.scalar(query)) is not None

    def run_id(self) -> str | None:
        """Return the id of the store's run; None in a new store and in stores older than run ids."""
        query = select(JOB.c.value).where(JOB.c.key == "run")
        return self._database.read(lambda connection: connection.scalar(query))

    def set_run_id(self, run_id: str) -> None:
        """Assign the store to a run. Safe to repeat."""
        self._set_job("run", run_id)

    def _set_job_state(self, state: JobState) -> None:
        self._set_job("state", state)

    def _set_job(self, key: str, value: str) -> None:
        self._database.write(lambda connection, again: put(connection, JOB, [{"key": key, "value": value}]))


def _step_row(step: int, metrics: Mapping[str, float | None]) -> dict[str, Any]:
    finite = {name: value if value is not None and value - value == 0 else None for name, value in metrics.items()}
    return {"step": step, "recorded_at": time.time(), "metrics": dumps(finite)}


def mark_used(connection: Connection, step: int, used: Used) -> None:
    """Mark the groups that step number ``step`` has used."""
    marks = [{"id": group_id, "state": GroupState.CONSUMED, "reason": None} for group_id in used.consumed]
    marks += [{"id": group_id, "state": GroupState.DROPPED, "reason": why} for group_id, why in used.dropped.items()]
    if marks:
        values = {"state": bindparam("state"), "used_by": step, "reason": bindparam("reason")}
        connection.execute(update(GROUPS).where(GROUPS.c.group_id == bindparam("id")).values(values), marks)
    for table in (REPLAYS, EXCLUDED):
        connection.execute(delete(table).where(table.c.step == step))
    if used.excluded:
        rows = [
            {"step": step, "group_id": group_id, "index": index, "reason": reason}
            for (group_id, index), reason in used.excluded.items()
        ]
        connection.execute(insert(EXCLUDED), rows)
    if used.replayed:
        connection.execute(insert(REPLAYS), [{"step": step, "group_id": group_id} for group_id in used.replayed])


def event_of(row: Any) -> dict[str, Any]:
    """An event's row: {number, at, source, kind, data}."""
    return {"number": row.event_id, "at": row.at, "source": row.source, "kind": row.kind, "data": json.loads(row.data)}


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
