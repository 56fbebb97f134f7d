"""Rollouts: requests, progress, deletion; evaluations: countable, counted or withdrawn."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, delete, exists, func, insert, not_, or_, select, update

from megarl.buffer.store.claims import RolloutKind, cut_segments
from megarl.buffer.store.codec import GIVEN_LATER, dumps, versions_in
from megarl.buffer.store.journal import event_of, steps_of_weights
from megarl.buffer.store.tables import (
    EVENTS,
    EXCLUDED,
    GROUP_IMAGES,
    GROUPS,
    OPEN,
    REPLAYS,
    ROLLOUT_METRICS,
    ROLLOUTS,
    SAMPLED,
    SEGMENTS,
    STALE,
    STEPS,
    TASKS,
    TRAJECTORIES,
    VERSIONS,
    WHOLE,
    GroupState,
    chunks,
)
from megarl.buffer.store.transactions import Transactions
from megarl.core.errors import DataError
from megarl.core.jobs import OWN_WORKER
from megarl.core.schema import WeightsVersion

UNUSED = {"state": GroupState.READY, "used_by": None, "reason": None}
"""Column values of an unused group."""
FREED = {"state": GroupState.PENDING, "claimed_by": None, "claim_token": None, "ended_at": None}
"""Column values of a group to sample."""


UNCOUNTED = select(ROLLOUTS.c.rollout_id).where(
    ROLLOUTS.c.kind == "eval", ROLLOUTS.c.rollout_id.in_(select(GROUPS.c.rollout_id).where(GROUPS.c.state.in_(OPEN)))
)
"""Ids of evaluations with uncounted groups."""


class RolloutTable:
    """Rollouts requested by a trainer, group by group."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def request(
        self,
        rollout_id: str,
        kind: RolloutKind,
        step: int,
        version: WeightsVersion,
        task_ids: Sequence[str],
        group_size: int,
        sampling: Mapping[str, Any],
    ) -> None:
        """Request ``group_size`` samples of every task. A rollout with the same id is deleted first with all its data,
        so a resumed trainer can request it with new weights; old claims on it can no longer be finished.

        Args:
            step: Steps done before the step that the groups are for; for an evaluation, steps in its weights; in
                completion order, steps done at the request.
            version: Last published weights version, recorded by ``record_version``.
            sampling: temperature, max_tokens, seed; ``greedy``: one greedy answer to each task in addition to the
                samples; ``spare``: samples beyond ``group_size``; the last to end are left out of the group.

        Safe to repeat: a repetition recognises its rollout by the request time and keeps it, because groups may already
        be claimed.

        Raises DataError for an unknown task id.
        """
        known = self._known(task_ids)
        if unknown := [task_id for task_id in task_ids if task_id not in known]:
            raise DataError(
                f"rollout {rollout_id}: {len(unknown)} task ids are not in the store, the first is {unknown[0]!r}; "
                f"call store.tasks.add first"
            )
        rollout = {
            "rollout_id": rollout_id,
            "kind": kind,
            "step": step,
            "version": str(version),
            "num_groups": len(task_ids),
            "group_size": group_size,
            "sampling": dumps(dict(sampling)),
            "requested_at": time.time(),
        }
        groups = [
            {
                "group_id": f"{rollout_id}/{position}",
                "rollout_id": rollout_id,
                "position": position,
                "task_id": task_id,
                "state": GroupState.PENDING,
                "attempt": 0,
            }
            for position, task_id in enumerate(task_ids)
        ]

        def work(connection: Connection, again: bool) -> None:
            asked = select(ROLLOUTS.c.requested_at).where(ROLLOUTS.c.rollout_id == rollout_id)
            if again and connection.scalar(asked) == rollout["requested_at"]:
                return
            delete_rollouts(connection, [rollout_id])
            connection.execute(insert(ROLLOUTS), [rollout])
            if groups:
                connection.execute(insert(GROUPS), groups)

        self._database.write(work)

    def _known(self, task_ids: Sequence[str]) -> set[str]:
        """Return the ``task_ids`` that are in the store, read before the write lock is taken."""
        known: set[str] = set()
        for few in chunks(task_ids):
            query = select(TASKS.c.task_id).where(TASKS.c.task_id.in_(few))
            known |= self._database.read(lambda connection, query=query: set(connection.scalars(query)))  # type: ignore[misc]
        return known

    def discard(self, from_step: int, *, ahead: bool = False, saved: bool = False, claims: bool = False) -> None:
        """Delete every rollout of weights with at least ``from_step`` steps, and metrics and evaluations of later
        steps.

        A trainer that resumes at that step calls it first, because the weights of an earlier attempt's later rollouts
        no longer exist. Groups of earlier weights used by a later step become ready again, and replays by later steps
        are deleted. Unused groups with tokens of later weights are sampled again. Uncounted evaluations are deleted for
        all weights, because engines no longer have these. Rollouts of the weights of ``from_step`` stay if their
        rewards come later, because people may have given some.

        Rollouts count steps before them, metrics include their own step, so metrics of ``from_step`` stay. Safe to
        repeat.

        Args:
            ahead: Delete all unused training groups too, requested ahead of step ``from_step``.
            saved: A checkpoint has the weights of ``from_step``, so their rollouts go on, unfinished trajectories from
                their last segment.
            claims: Free groups claimed by the job's own explorers: none of an earlier attempt is left.
        """
        steps = ROLLOUTS.c.step if ahead else steps_of_weights()

        def work(connection: Connection, again: bool) -> None:
            # Further rounds of a step follow from its first one, so they stay with it.
            further = and_(ROLLOUTS.c.step >= from_step + saved, ROLLOUTS.c.rollout_id.like("train-%-%"))
            undone = or_(steps >= from_step, further)
            if saved:
                undone = or_(steps > from_step, further, and_(steps == from_step, ROLLOUTS.c.kind != "train"))
            elif not ahead:
                undone = and_(undone, or_(steps > from_step, not_(_waits_for_people())))
            which = or_(undone, ROLLOUTS.c.rollout_id.in_(UNCOUNTED))
            ids = list(connection.scalars(select(ROLLOUTS.c.rollout_id).where(which)))
            delete_rollouts(connection, ids)
            connection.execute(update(GROUPS).where(GROUPS.c.used_by > from_step).values(UNUSED))
            connection.execute(update(GROUPS).where(_lacks_rewards()).values(state=GroupState.AWAITING))
            if ahead:
                _delete_unused(connection)
            else:
                _sample_again(connection, from_step)
            if claims:
                own = (GROUPS.c.state == GroupState.CLAIMED, GROUPS.c.claimed_by.startswith(OWN_WORKER))
                connection.execute(update(GROUPS).where(*own).values(FREED))
            # Engines of explore programs keep running with weights that no longer exist: no training group is claimed
            # until they get new ones.
            connection.execute(update(VERSIONS).values(live=STALE))
            for table in (REPLAYS, EXCLUDED, STEPS):
                connection.execute(delete(table).where(table.c.step > from_step))
            evaluations = connection.execute(select(EVENTS).where(EVENTS.c.kind == "evaluation"))
            later = [row.event_id for row in evaluations if event_of(row)["data"].get("step", 0) > from_step]
            connection.execute(delete(EVENTS).where(EVENTS.c.event_id.in_(later)))

        self._database.write(work)

    def progress(self, rollout_id: str, *, awaiting: bool = False) -> tuple[int, int]:
        """Return (whole groups, all groups); ``awaiting``: groups that still await rewards count as whole."""
        whole = func.sum(case((GROUPS.c.state.in_(SAMPLED if awaiting else WHOLE), 1), else_=0))
        query = select(whole, func.count()).where(GROUPS.c.rollout_id == rollout_id)
        row = self._database.read(lambda connection: connection.execute(query).one())
        return int(row[0] or 0), int(row[1])

    def is_complete(self, rollout_id: str, *, awaiting: bool = False) -> bool:
        """Return True if all groups are whole, as in ``progress``, or counted for an evaluation."""
        whole = GROUPS.c.state.in_(SAMPLED if awaiting else WHOLE)
        done = case((ROLLOUTS.c.kind == "eval", GROUPS.c.state == GroupState.CONSUMED), else_=whole)
        missing = (
            select(GROUPS.c.group_id)
            .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            .where(GROUPS.c.rollout_id == rollout_id, not_(done))
        )
        return self._database.read(lambda connection: connection.execute(missing.limit(1)).first()) is None

    def task_sources(self, rollout_id: str) -> dict[str, str]:
        """Return task id -> data source for a rollout's tasks, by position."""
        query = (
            select(GROUPS.c.task_id, TASKS.c.data_source)
            .join(TASKS, TASKS.c.task_id == GROUPS.c.task_id)
            .where(GROUPS.c.rollout_id == rollout_id)
            .order_by(GROUPS.c.position)
        )
        return {row[0]: row[1] for row in self._database.read(lambda connection: connection.execute(query).all())}

    def is_requested(self, rollout_id: str) -> bool:
        """Return True once the rollout was requested."""
        query = select(ROLLOUTS.c.sequence).where(ROLLOUTS.c.rollout_id == rollout_id)
        return self._database.read(lambda connection: connection.execute(query).first()) is not None

    def metrics(self, rollout_id: str) -> dict[str, float]:
        """Return the metrics of a rollout (seconds, tokens, samples), summed over explorers."""
        query = select(ROLLOUT_METRICS).where(ROLLOUT_METRICS.c.rollout_id == rollout_id)
        total: dict[str, float] = {}
        for metrics in self._database.read(
            lambda connection: [json.loads(row.metrics) for row in connection.execute(query)]
        ):
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value
        return total


def _lacks_rewards() -> ColumnElement[bool]:
    """Return the condition on unused training groups that a step had dropped for missing rewards."""
    late = select(TRAJECTORIES.c.group_id).where(
        TRAJECTORIES.c.group_id == GROUPS.c.group_id, TRAJECTORIES.c.status == "late"
    )
    trained = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.kind == "train")
    return and_(GROUPS.c.state == GroupState.READY, GROUPS.c.rollout_id.in_(trained), late.exists())


def _waits_for_people() -> ColumnElement[bool]:
    """Return the condition on training rollouts with late rewards, given or awaited."""
    late = or_(TRAJECTORIES.c.status == "late", TRAJECTORIES.c.record.contains(f'"{GIVEN_LATER}":true'))
    of_rollout = TRAJECTORIES.c.rollout_id == ROLLOUTS.c.rollout_id
    return and_(ROLLOUTS.c.kind == "train", select(TRAJECTORIES.c.group_id).where(of_rollout, late).exists())


def _delete_unused(connection: Connection) -> None:
    """Delete unused training groups."""
    unused = GROUPS.c.state.in_((GroupState.PENDING, GroupState.CLAIMED, GroupState.AWAITING, GroupState.READY))
    trained = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.kind == "train")
    ids = list(connection.scalars(select(GROUPS.c.group_id).where(unused, GROUPS.c.rollout_id.in_(trained))))
    for few in chunks(ids):
        connection.execute(delete(GROUPS).where(GROUPS.c.group_id.in_(few)))  # first, as in ``delete_rollouts``
        for table in (TRAJECTORIES, GROUP_IMAGES, SEGMENTS):
            connection.execute(delete(table).where(table.c.group_id.in_(few)))


def _sample_again(connection: Connection, from_step: int) -> None:
    """Make unused groups pending again if they may have tokens of weights with more than ``from_step`` steps, including
    groups of running explorers. Tokens sampled before those stay as segments."""
    dead = set(connection.scalars(select(VERSIONS.c.version).where(VERSIONS.c.step > from_step)))
    if not dead:
        return
    query = (
        select(TRAJECTORIES.c.group_id, TRAJECTORIES.c.record)
        .join(GROUPS, GROUPS.c.group_id == TRAJECTORIES.c.group_id)
        .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
        .where(GROUPS.c.state.in_((GroupState.AWAITING, GroupState.READY)), ROLLOUTS.c.kind == "train")
    )
    ids = {row.group_id for row in connection.execute(query) if versions_in(row.record) & dead}
    trained = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.kind == "train")
    claimed = (GROUPS.c.state == GroupState.CLAIMED, GROUPS.c.rollout_id.in_(trained))
    ids |= set(connection.scalars(select(GROUPS.c.group_id).where(*claimed)))
    ids |= set(connection.scalars(select(SEGMENTS.c.group_id).where(SEGMENTS.c.rollout_id.in_(trained)).distinct()))
    beyond = (GROUPS.c.reached > from_step, GROUPS.c.rollout_id.in_(trained))
    connection.execute(update(GROUPS).where(*beyond).values(reached=None))
    for few in chunks(sorted(ids)):
        # First, as in ``delete_rollouts``: it waits for concurrent puts and appends and prevents later ones.
        connection.execute(update(GROUPS).where(GROUPS.c.group_id.in_(few)).values(FREED))
        cut_segments(connection, few, dead)
        for table in (TRAJECTORIES, GROUP_IMAGES):
            connection.execute(delete(table).where(table.c.group_id.in_(few)))


def delete_rollouts(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Delete rollouts with their groups, trajectories and metrics."""
    # Groups first: on PostgreSQL this waits for a worker that finishes one; its rows are deleted next.
    for table in (GROUPS, TRAJECTORIES, GROUP_IMAGES, SEGMENTS, ROLLOUT_METRICS, ROLLOUTS):
        for rollout_id in rollout_ids:
            connection.execute(delete(table).where(table.c.rollout_id == rollout_id))


class EvaluationTable:
    """Rollouts of held-out tasks."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def to_count(self, rollout_id: str | None = None) -> list[tuple[str, int, int]]:
        """Return (id, step, answers to each task) of evaluations with all groups ready; only of ``rollout_id``, if
        given.

        Reads one group per state, for any number of groups (``groups_in_order``).
        """

        def has(*states: GroupState) -> ColumnElement[bool]:
            return exists().where(GROUPS.c.rollout_id == ROLLOUTS.c.rollout_id, GROUPS.c.state.in_(states))

        others = [state for state in GroupState if state != GroupState.READY]
        query = (
            select(ROLLOUTS.c.rollout_id, ROLLOUTS.c.step, ROLLOUTS.c.group_size)
            .where(ROLLOUTS.c.kind == "eval", has(GroupState.READY), not_(has(*others)))
            .order_by(ROLLOUTS.c.sequence)
        )
        if rollout_id is not None:
            query = query.where(ROLLOUTS.c.rollout_id == rollout_id)
        return [tuple(row) for row in self._database.read(lambda connection: connection.execute(query).all())]

    def read(self, rollout_id: str) -> dict[str, Any]:
        """Return the data of a complete evaluation's event."""
        query = select(EVENTS).where(EVENTS.c.kind == "evaluation").order_by(EVENTS.c.event_id.desc())
        events = self._database.read(lambda connection: [event_of(row)["data"] for row in connection.execute(query)])
        found: dict[str, Any] = next(data for data in events if data["rollout_id"] == rollout_id)
        return found

    def uncounted(self) -> dict[str, int]:
        """Return id -> steps in its weights, for each requested evaluation not yet counted."""
        query = select(ROLLOUTS.c.rollout_id, ROLLOUTS.c.step).where(ROLLOUTS.c.rollout_id.in_(UNCOUNTED))
        return {
            row.rollout_id: row.step for row in self._database.read(lambda connection: connection.execute(query).all())
        }

    def withdraw(self, rollout_id: str) -> None:
        """Delete a rollout with all its data; claims on it can no longer be finished. Safe to repeat."""
        self._database.write(lambda connection, again: delete_rollouts(connection, [rollout_id]))
