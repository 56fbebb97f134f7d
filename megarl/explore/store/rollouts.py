"""The trainer's side of rollouts: asked for, followed, read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, case, delete, func, insert, select

from megarl.core.errors import DataError
from megarl.core.schema import GREEDY, Trajectory, WeightsVersion
from megarl.explore.store.checksums import sealed
from megarl.explore.store.claims import RolloutKind
from megarl.explore.store.codec import dumps, trajectory_from_row
from megarl.explore.store.handle import Handle
from megarl.explore.store.journal import event_of, metrics_of
from megarl.explore.store.tables import EVENTS, GROUPS, ROLLOUT_METRICS, ROLLOUTS, STEPS, TASKS, TRAJECTORIES

SPAN_BYTES = 64 * 2**20
"""Bytes of the arrays that are read or written together: of a row, the driver's and the decoded bytes exist side by
side."""


class RolloutTable(Handle):
    """Rollouts that a trainer asks for, group by group."""

    def request_rollout(
        self,
        rollout_id: str,
        kind: RolloutKind,
        step: int,
        version: WeightsVersion,
        task_ids: Sequence[str],
        group_size: int,
        sampling: Mapping[str, Any],
    ) -> None:
        """Ask for ``group_size`` samples of every task. A rollout of the same id is replaced with all it produced,
        so that a resumed trainer asks again with its new weights; a claim on the old one can no longer be finished.

        ``sampling``: temperature, max_tokens, seed; ``greedy``: one greedy answer to each task beside the samples.

        Safe to repeat: a call knows its own rollout by the time at which it asked, and does not replace that one, whose
        groups may be claimed already.

        Raises DataError for an unknown task id.
        """
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
                "state": "pending",
                "attempt": 0,
            }
            for position, task_id in enumerate(task_ids)
        ]

        def work(connection: Connection, again: bool) -> None:
            asked = select(ROLLOUTS.c.requested_at).where(ROLLOUTS.c.rollout_id == rollout_id)
            if again and connection.scalar(asked) == rollout["requested_at"]:
                return
            known = set(connection.scalars(select(TASKS.c.task_id)))
            unknown = [task_id for task_id in task_ids if task_id not in known]
            if unknown:
                raise DataError(
                    f"rollout {rollout_id}: {len(unknown)} task ids are not in the store, the first is {unknown[0]!r}; "
                    f"add_tasks first"
                )
            delete_rollouts(connection, [rollout_id])
            connection.execute(insert(ROLLOUTS), [sealed(ROLLOUTS, rollout)])
            if groups:
                connection.execute(insert(GROUPS), [sealed(GROUPS, group) for group in groups])

        self._write(work)

    def discard_rollouts(self, from_step: int) -> None:
        """Forget every rollout of a step >= ``from_step`` with its trajectories, and metrics and evaluations of later
        steps.

        Rollouts carry the number of steps done before them, recorded metrics the number done with theirs: those of
        ``from_step`` itself stay.

        A trainer that resumes at that step calls it first: what an earlier attempt left undone was asked for with
        weights that no longer exist. Safe to repeat: then there is nothing left to forget.
        """

        def work(connection: Connection, again: bool) -> None:
            ids = list(connection.scalars(select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.step >= from_step)))
            delete_rollouts(connection, ids)
            connection.execute(delete(STEPS).where(STEPS.c.step > from_step))
            evaluations = connection.execute(select(EVENTS).where(EVENTS.c.kind == "evaluation"))
            later = [row.event_id for row in evaluations if event_of(row)["data"].get("step", 0) > from_step]
            connection.execute(delete(EVENTS).where(EVENTS.c.event_id.in_(later)))

        self._write(work)

    def progress(self, rollout_id: str) -> tuple[int, int]:
        """(groups done, groups in all)."""
        done = func.sum(case((GROUPS.c.state == "done", 1), else_=0))
        query = select(done, func.count()).where(GROUPS.c.rollout_id == rollout_id)
        row = self._read(lambda connection: connection.execute(query).one())
        return int(row[0] or 0), int(row[1])

    def rollout_metrics(self, rollout_id: str) -> dict[str, float]:
        """Metrics of the explorers for a rollout, summed over them (seconds, tokens, samples)."""
        query = select(ROLLOUT_METRICS).where(ROLLOUT_METRICS.c.rollout_id == rollout_id)
        total: dict[str, float] = {}
        for metrics in self._read(
            lambda connection: [metrics_of(ROLLOUT_METRICS, row) for row in connection.execute(query)]
        ):
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def trajectories(self, rollout_id: str, span: range | None = None) -> list[Trajectory]:
        """Trajectories of the groups done so far (at the positions of ``span``), ordered by (group position, index).

        A greedy answer comes with each trajectory of its group, not as one of them.
        """
        if span is None:
            return [e for span in self.spans(rollout_id) for e in self.trajectories(rollout_id, span)]
        query = (
            select(TRAJECTORIES)
            .join(GROUPS, GROUPS.c.group_id == TRAJECTORIES.c.group_id)
            .where(TRAJECTORIES.c.rollout_id == rollout_id, GROUPS.c.state == "done")
            .where(GROUPS.c.position.between(span.start, span.stop - 1))
            .order_by(GROUPS.c.position, TRAJECTORIES.c.index)
        )
        found = self._read(lambda connection: [trajectory_from_row(row) for row in connection.execute(query)])
        greedy = {trajectory.group_id: trajectory for trajectory in found if trajectory.index == GREEDY}
        return [replace(e, greedy=greedy.get(e.group_id)) for e in found if e.index != GREEDY]

    def spans(self, rollout_id: str, nbytes: int = SPAN_BYTES) -> list[range]:
        """Positions of the groups done so far, in runs whose arrays have ``nbytes`` at most, one group at least."""
        size = func.coalesce(func.sum(func.length(TRAJECTORIES.c.tensors)), 0)
        query = (
            select(GROUPS.c.position, size)
            .outerjoin(TRAJECTORIES, TRAJECTORIES.c.group_id == GROUPS.c.group_id)
            .where(GROUPS.c.rollout_id == rollout_id, GROUPS.c.state == "done")
            .group_by(GROUPS.c.position)
            .order_by(GROUPS.c.position)
        )
        found: list[range] = []
        room = 0
        for position, needed in self._read(lambda connection: connection.execute(query).all()):
            if found and needed <= room:
                found[-1] = range(found[-1].start, position + 1)
            else:
                found.append(range(position, position + 1))
                room = nbytes
            room -= needed
        return found


def delete_rollouts(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Delete rollouts with their groups, trajectories and metrics."""
    # Groups first: on PostgreSQL this waits for a worker that is finishing one, and what that wrote is deleted next.
    for table in (GROUPS, TRAJECTORIES, ROLLOUT_METRICS, ROLLOUTS):
        for rollout_id in rollout_ids:
            connection.execute(delete(table).where(table.c.rollout_id == rollout_id))
