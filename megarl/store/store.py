"""Tasks, rollouts, groups and trajectories in one SQL database.

The trainer asks for a rollout (one group per task); explorers claim groups and hand each back whole, in one
transaction; the trainer reads what is done. A claim carries a token, and only the claim that a group has *now* may
finish it: whatever happens to explorers, a group's trajectories are written once.

Every write is one transaction, fenced by the job's attempt and repeated when the connection was lost
(``transactions.py``); each says why a repetition does no harm. SQLite runs in WAL mode with ``synchronous=NORMAL``:
killing any process loses no committed transaction. A power cut may lose those since the last ``sync``, which comes
before every checkpoint's manifest. WAL needs a local file system.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sqlalchemy import Connection, Row, Table, case, delete, func, insert, select, update

from megarl.errors import DataError
from megarl.schema import GREEDY, Task, Trajectory, WeightsVersion
from megarl.store import claims
from megarl.store.checksums import check, sealed
from megarl.store.claims import Claim, RolloutKind, images_of
from megarl.store.codec import dumps, task_from_row, task_to_row, trajectory_from_row, trajectory_to_row
from megarl.store.tables import EVENTS, GROUPS, JOB, ROLLOUT_METRICS, ROLLOUTS, STEPS, TASK_IMAGES, TASKS, TRAJECTORIES
from megarl.store.transactions import Transactions, put

SPAN_BYTES = 64 * 2**20
"""Bytes of the arrays that are read or written together: of a row, the driver's and the decoded bytes exist side by
side."""
LEASE_S = 3600.0
"""Age after which a claim is taken from a worker that never came back. A live worker's claims are much younger."""

JobState = Literal["open", "closed"]


class Store:
    """A connection to the store, for one process (make a new one after a fork).

    Args:
        url: ``store.url``, or SQLAlchemy's for sqlite or postgresql.
        attempt: Of the job that this process belongs to. Every write raises FencedError once another one has begun.
            None (reports, tools) writes whatever attempt there is.
        outage_s: How long a database that does not answer is waited for; 0 fails at once.

    Raises:
        ConfigError: the URL cannot be read or its driver is missing.
        JobError: (here, and every method) the database could not be used for ``outage_s``.
        StoreDamagedError: (here, and every method) a page or a row is not as it was written.
        FencedError: (here, and every write) the job has begun another attempt.
    """

    def __init__(self, url: str, *, attempt: int | None = None, outage_s: float = 0.0, read_only: bool = False) -> None:
        self._database = Transactions(url, attempt, outage_s, read_only=read_only)
        self._read, self._write = self._database.read, self._database.write

    def close(self) -> None:
        """Close this process's connections."""
        self._database.close()

    def begin_attempt(self, attempt: int) -> None:
        """Count a start of the job, before any of its processes starts: those of earlier ones can write nothing any
        more. This handle belongs to the new attempt. Safe to repeat, see :meth:`Transactions.begin_attempt`.

        Raises FencedError when the stored attempt is not smaller.
        """
        self._database.begin_attempt(attempt)

    # ------------------------------------------------------------------ tasks

    def add_tasks(self, split: str, tasks: Sequence[Task]) -> None:
        """Make ``tasks`` the whole of ``split``, in this order. Safe to repeat: the split is written again.

        Raises DataError when a task id occurs twice or belongs to another split, or a text holds a NUL character.
        """
        ids = [task.task_id for task in tasks]
        if len(set(ids)) != len(ids):
            twice = next(task_id for i, task_id in enumerate(ids) if task_id in ids[:i])
            raise DataError(f"task id {twice!r} occurs twice in split {split!r}; ids must be unique")
        rows = [sealed(TASKS, task_to_row(task) | {"split": split, "position": i}) for i, task in enumerate(tasks)]

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
            for task in tasks:  # one after another: a row's images may be 32 MiB
                for i, image in enumerate(task.images):
                    row = {"task_id": task.task_id, "position": i, "image": image}
                    connection.execute(insert(TASK_IMAGES), sealed(TASK_IMAGES, row))

        self._write(work)

    def task_ids(self, split: str) -> list[str]:
        """Ids of a split's tasks in the order in which they were added."""
        query = select(TASKS.c.task_id).where(TASKS.c.split == split).order_by(TASKS.c.position)
        return self._read(lambda connection: list(connection.scalars(query)))

    def tasks(self, split: str, *, images: bool = True) -> list[Task]:
        """A split's tasks in the order in which they were added; without ``images`` those are not read, and each has
        none."""

        def work(connection: Connection) -> list[Task]:
            rows = connection.execute(select(TASKS).where(TASKS.c.split == split).order_by(TASKS.c.position)).all()
            found = images_of(connection, select(TASKS.c.task_id).where(TASKS.c.split == split)) if images else {}
            return [task_from_row(row, found.get(row.task_id, ())) for row in rows]

        return self._read(work)

    # --------------------------------------------------------------- rollouts

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
            later = [row.event_id for row in evaluations if _event(row)["data"].get("step", 0) > from_step]
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
            lambda connection: [_metrics(ROLLOUT_METRICS, row) for row in connection.execute(query)]
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

    # ----------------------------------------------------------------- claims

    def claim_groups(
        self, worker: str, limit: int, *, max_samples: int | None = None, lease_s: float = LEASE_S
    ) -> list[Claim]:
        """Claim up to ``limit`` groups, oldest rollout first; groups that others claimed over ``lease_s`` ago count as
        free (one's own do not: who is slow would be given its own work again; ``release_claims`` frees those of a
        predecessor).

        With ``max_samples`` the groups' sizes add up to at most that many, except that one group is always claimed.

        No two claims hold the same group: SQLite's writers take turns, PostgreSQL skips rows that another locks.

        Safe to repeat: a call knows by its token what it has claimed already, and claims nothing beside that.
        """
        now, token = time.time(), uuid.uuid4().hex
        free = claims.is_free(worker, claimed_before=now - lease_s)
        look = (
            select(GROUPS.c.group_id).where(free).limit(1)
        )  # without the write lock: an idle explorer disturbs nobody
        if limit < 1 or self._read(lambda connection: connection.execute(look).first()) is None:
            return []
        held = {"claimed_by": worker, "claimed_at": now, "claim_token": token}

        def work(connection: Connection, again: bool) -> tuple[list[Row[Any]], list[Row[Any]]]:
            groups = claims.held_by(connection, token) if again else []
            groups = groups or claims.claim(connection, free, limit, max_samples, held)
            return groups, claims.tasks_of(connection, {group.task_id for group in groups})

        groups, tasks = self._write(work)
        # Images may be many bytes: not under the write lock.
        return self._read(
            lambda connection: claims.claims_of(groups, tasks, images_of(connection, {task.task_id for task in tasks}))
        )

    def finish_group(
        self, claim: Claim, trajectories: Sequence[Trajectory], metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Write a whole group's trajectories and mark it done, in one transaction.

        ``metrics`` replaces what this worker has reported for the rollout so far. Returns False, writing nothing,
        when the claim is no longer the group's (released, expired, or the rollout was asked for again).

        Safe to repeat: a group is marked done with its trajectories, once; finding it done with this claim's token, a
        repetition writes nothing and returns True, since it was this call that did it.
        """
        rows = [trajectory_to_row(trajectory) for trajectory in trajectories]
        indices = sorted(row["index"] for row in rows)
        assert indices == claim.indices, (
            f"group {claim.group_id} of size {claim.group_size} finished with indices {indices}"
        )
        assert all(row["group_id"] == claim.group_id for row in rows), (
            f"a trajectory of another group in {claim.group_id}"
        )
        return self._write(lambda connection, again: claims.finish(connection, again, claim, rows, metrics))

    def release_claims(self, worker: str) -> int:
        """Give back every group that ``worker`` holds; returns how many. For a worker that stops or has died.

        Safe to repeat, since the worker claims nothing meanwhile; the number is then what was left to give back.
        """
        held = (GROUPS.c.state == "claimed", GROUPS.c.claimed_by == worker)
        free = {"state": "pending", "claimed_by": None, "claimed_at": None, "claim_token": None}
        return self._write(
            lambda connection, again: connection.execute(update(GROUPS).where(*held).values(free)).rowcount
        )

    # ------------------------------------------------------ steps, events, job

    def record_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's metrics; a repeated step replaces its first record, so that it is safe to repeat."""
        finite = {name: value if value - value == 0 else None for name, value in metrics.items()}
        row = {"step": step, "recorded_at": time.time(), "metrics": dumps(finite)}
        self._write(lambda connection, again: put(connection, STEPS, [row]))

    def steps(self) -> list[tuple[int, dict[str, float | None]]]:
        """Recorded (step, metrics) in order; a metric that was not finite reads None."""
        query = select(STEPS).order_by(STEPS.c.step)
        return self._read(lambda connection: [(row.step, _metrics(STEPS, row)) for row in connection.execute(query)])

    def record_event(self, source: str, kind: str, data: Mapping[str, Any]) -> None:
        """Append to the job's log of events (a retry, a restart, a warning).

        Safe to repeat: an event of the same instant, source and content is this call's.
        """
        event = {"at": time.time(), "source": source, "kind": kind, "data": dumps(dict(data))}
        same = select(EVENTS.c.event_id).where(*(EVENTS.c[name] == value for name, value in event.items()))

        def work(connection: Connection, again: bool) -> None:
            if not (again and connection.execute(same).first()):
                connection.execute(insert(EVENTS), [sealed(EVENTS, event)])

        self._write(work)

    def events(self, kind: str | None = None, after: float = 0.0) -> list[dict[str, Any]]:
        """Events in order, those later than ``after``: {at (unix seconds), source, kind, data}."""
        query = select(EVENTS).where(EVENTS.c.at > after).order_by(EVENTS.c.event_id)
        if kind is not None:
            query = query.where(EVENTS.c.kind == kind)
        return self._read(lambda connection: [_event(row) for row in connection.execute(query)])

    def sync(self) -> None:
        """Return when all that any process has committed so far would outlive a power cut. Safe to repeat."""
        self._database.sync()

    def open_job(self) -> None:
        """Say that work may still be asked for. Safe to repeat."""
        self._set_job_state("open")

    def close_job(self) -> None:
        """Say that no more work will be asked for; explorers end when they see it. Safe to repeat."""
        self._set_job_state("closed")

    def job_state(self) -> JobState:
        """``open`` until :meth:`close_job`."""
        query = select(JOB.c.value).where(JOB.c.key == "state")
        return self._read(lambda connection: connection.scalar(query)) or "open"

    def run_id(self) -> str | None:
        """Identity of the run whose store this is; None in a new one, and in those from before there were any."""
        query = select(JOB.c.value).where(JOB.c.key == "run")
        return self._read(lambda connection: connection.scalar(query))

    def set_run_id(self, run_id: str) -> None:
        """Take the store for a run. Safe to repeat."""
        self._set_job("run", run_id)

    def _set_job_state(self, state: JobState) -> None:
        self._set_job("state", state)

    def _set_job(self, key: str, value: str) -> None:
        self._write(lambda connection, again: put(connection, JOB, [{"key": key, "value": value}]))


def _metrics(table: Table, row: Any) -> dict[str, Any]:
    check(table, row)
    metrics: dict[str, Any] = json.loads(row.metrics)
    return metrics


def _event(row: Any) -> dict[str, Any]:
    check(EVENTS, row)
    return {"at": row.at, "source": row.source, "kind": row.kind, "data": json.loads(row.data)}


def delete_rollouts(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Delete rollouts with their groups, trajectories and metrics."""
    # Groups first: on PostgreSQL this waits for a worker that is finishing one, and what that wrote is deleted next.
    for table in (GROUPS, TRAJECTORIES, ROLLOUT_METRICS, ROLLOUTS):
        for rollout_id in rollout_ids:
            connection.execute(delete(table).where(table.c.rollout_id == rollout_id))
