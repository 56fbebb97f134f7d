"""The buffer between explorer and trainer: groups claimed, put, taken.

``pending`` → ``claimed`` → ``ready`` → ``consumed`` or ``dropped`` (``tables.GroupState``). Explorers claim groups and
put each back whole. A trainer takes ready groups; ``Journal.record_step`` commits the groups that a step used.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from megarl.buffer.store import claims
from megarl.buffer.store.claims import Claim, EndedGroup, SegmentTable, images_of
from megarl.buffer.store.codec import (
    OutlineRow,
    has_bounds,
    is_outline,
    outline_from_row,
    trajectory_from_row,
    trajectory_to_row,
    with_arrays,
)
from megarl.buffer.store.tables import (
    GROUP_IMAGES,
    GROUPS,
    IDS,
    ROLLOUTS,
    SAMPLED,
    SEGMENTS,
    TRAJECTORIES,
    GroupState,
    chunks,
)
from megarl.buffer.store.transactions import Transactions
from megarl.core.schema import GREEDY, Trajectory, WeightsVersion

PART_BYTES = 64 * 2**20
"""Bytes of arrays read or written together; memory holds each row twice, as the driver's bytes and decoded."""
ARRAYS = select(TRAJECTORIES.c.group_id, TRAJECTORIES.c.index.label("number"), TRAJECTORIES.c.tensors).where(
    TRAJECTORIES.c.group_id.in_(bindparam("groups", expanding=True)),  # SQLite has no index for pairs of values
    tuple_(TRAJECTORIES.c.group_id, TRAJECTORIES.c.index).in_(bindparam("members", expanding=True)),
)
"""Arrays of trajectories. Made once, because SQLAlchemy takes longer to build the query than SQLite to answer it."""


class GroupTable:
    """Groups on their way from explorers to a trainer."""

    def __init__(self, database: Transactions, segments: SegmentTable) -> None:
        self._database = database
        self._segments = segments

    def claim(
        self,
        worker: str,
        limit: int,
        *,
        max_samples: int | None = None,
        silent: Collection[str] = (),
        evaluations: bool = True,
    ) -> list[Claim]:
        """Claim up to ``limit`` groups, evaluations first, then the oldest rollout. Groups of other workers in
        ``silent`` (``workers.Silence``) count as free; ``release`` frees groups of a predecessor with the same name.

        The groups' sizes add up to at most ``max_samples``, except that one group is always claimed. Without
        ``evaluations`` only training groups are claimed. Between a trainer's resume and its first publication no
        training group is claimed.

        No two claims hold the same group: SQLite serialises writers, PostgreSQL skips locked rows.

        Safe to repeat: a repetition finds the groups already claimed with its token and claims no others.
        """
        token = uuid.uuid4().hex
        expired = claims.is_held_by(set(silent) - {worker})
        # Read without the write lock, so that an idle explorer blocks no other process.
        look = select(GROUPS.c.group_id).where(or_(claims.PENDING, expired)).limit(1)
        if not evaluations:
            look = look.where(GROUPS.c.rollout_id.in_(claims.TRAINED))
        if limit < 1 or self._database.read(lambda connection: connection.execute(look).first()) is None:
            return []
        held = {"claimed_by": worker, "claim_token": token}

        def work(connection: Connection, again: bool) -> tuple[list[Row[Any]], list[Row[Any]], WeightsVersion | None]:
            groups = claims.held_by(connection, token) if again else []
            groups = groups or claims.claim(connection, expired, limit, max_samples, held, evaluations)
            tasks = claims.tasks_of(connection, {group.task_id for group in groups})
            return groups, tasks, claims.first_live(connection)

        groups, tasks, live = self._database.write(work)
        # Images and segments may be large, so they are read without the write lock.
        images = self._database.read(lambda connection: images_of(connection, {task.task_id for task in tasks}))
        return claims.claims_of(groups, tasks, images, self._segments.read([group.group_id for group in groups]), live)

    def put(self, claim: Claim, trajectories: Sequence[Trajectory], metrics: Mapping[str, float] | None = None) -> bool:
        """Write one whole group, as ``put_all``."""
        return self.put_all([EndedGroup(claim, trajectories, metrics)])[0]

    def put_all(self, ended: Sequence[EndedGroup]) -> list[bool]:
        """Write whole groups' trajectories and mark them ready, in one transaction.

        Returns False for each group that was not written because the claim is no longer valid (released, expired, or
        the rollout was requested again).

        Safe to repeat: a repetition finds the group ready with this claim's token, writes nothing and returns True.
        """
        rows = [_rows_of(group) for group in ended]

        def work(connection: Connection, again: bool) -> list[bool]:
            made = [claims.make_ready(connection, group) for group in ended]
            if new := [row for found, is_new in zip(rows, made, strict=True) if is_new for row in found]:
                connection.execute(insert(TRAJECTORIES), new)
                for group in (group for group, is_new in zip(ended, made, strict=True) if is_new):
                    _add_images(connection, group)
                connection.execute(delete(SEGMENTS).where(SEGMENTS.c.group_id.in_({row["group_id"] for row in new})))
            written = [
                is_new or (again and claims.is_ready(connection, group.claim))
                for group, is_new in zip(ended, made, strict=True)
            ]
            claims.report(connection, [group for group, ours in zip(ended, written, strict=True) if ours])
            return written

        return self._database.write(work)

    def release(self, worker: str) -> int:
        """Release every group claimed by ``worker``, which stops or has died; return their number.

        Safe to repeat, because the worker claims no groups then; the number counts only groups still claimed.
        """
        held = (GROUPS.c.state == GroupState.CLAIMED, GROUPS.c.claimed_by == worker)
        free = {"state": GroupState.PENDING, "claimed_by": None, "claim_token": None}
        return self._database.write(
            lambda connection, again: connection.execute(update(GROUPS).where(*held).values(free)).rowcount
        )

    def take(self, n: int, *, step: int, without: Collection[str] = ()) -> list[str]:
        """Choose up to ``n`` ready groups requested for a training step; return their ids in request order.

        Writes nothing: groups are consumed when their step is recorded, so a killed step finds them again.

        Args:
            step: Steps done before the one that trains on them.
            without: Ids of groups that the step already has.
        """
        query = (
            select(GROUPS.c.group_id)
            .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            .where(GROUPS.c.state == GroupState.READY, ROLLOUTS.c.kind == "train")
            .where(ROLLOUTS.c.step == step)
            .order_by(ROLLOUTS.c.sequence, GROUPS.c.position)
        )
        ready = self._database.read(lambda connection: list(connection.scalars(query)))
        without = set(without)
        return [group_id for group_id in ready if group_id not in without][:n]

    def array_bytes(self, group_ids: Sequence[str]) -> dict[str, int]:
        """Return group id -> bytes of its arrays, for groups with arrays."""
        size = func.coalesce(func.sum(func.length(TRAJECTORIES.c.tensors)), 0)
        sizes: dict[str, int] = {}
        for few in chunks(group_ids):
            query = select(TRAJECTORIES.c.group_id, size).where(TRAJECTORIES.c.group_id.in_(few))
            query = query.group_by(TRAJECTORIES.c.group_id)
            sizes |= {row[0]: int(row[1]) for row in self._database.read(lambda c, query=query: c.execute(query).all())}  # type: ignore[misc]
        return sizes

    def parts(self, group_ids: Sequence[str], nbytes: int = PART_BYTES) -> list[list[str]]:
        """Split groups into parts with at most ``nbytes`` of arrays, but at least one group each."""
        sizes = self.array_bytes(group_ids)
        found: list[list[str]] = []
        room = 0
        for group_id in group_ids:
            needed = sizes.get(group_id, 0)
            if found and needed <= room and len(found[-1]) < IDS:
                found[-1].append(group_id)
            else:
                found.append([group_id])
                room = nbytes
            room -= needed
        return found

    def read(self, group_ids: Sequence[str]) -> list[Trajectory]:
        """Return the trajectories of whole groups, ordered by (rollout, position of the group, index).

        A greedy answer is attached to each trajectory of its group, not listed as a trajectory.
        """
        return [e for few in chunks(group_ids) for e in self._read_where(TRAJECTORIES.c.group_id.in_(few))]

    def outline_rows(self, group_ids: Sequence[str]) -> list[OutlineRow]:
        """Return the rows of whole groups without their arrays, ordered as in ``read``; ``outlines_of`` reads them."""
        columns = [TRAJECTORIES.c[name] for name in OutlineRow.__annotations__]
        rows: list[Row[Any]] = []
        for few in chunks(group_ids):
            query = _ordered(select(*columns)).where(TRAJECTORIES.c.group_id.in_(few))
            rows += self._database.read(lambda c, query=query: c.execute(query).all())  # type: ignore[misc]
        return [OutlineRow(**row._mapping) if has_bounds(row.record) else self._with_bounds(row) for row in rows]

    def arrays(self, members: Mapping[str, Collection[int]]) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Return (group id, index) -> arrays of trajectories, for ``codec.with_arrays``. ``members``: group id ->
        indices."""
        found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        for few in chunks([(group, index) for group, indices in members.items() for index in sorted(indices)]):
            given = {"groups": list(dict.fromkeys(group for group, _ in few)), "members": few}
            rows: Sequence[Row[Any]] = self._database.read(lambda c, given=given: c.execute(ARRAYS, given).all())  # type: ignore[misc]
            found |= {(row.group_id, row.number): load_tensors(row.tensors) for row in rows}
        return found

    def whole(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return trajectories in the same order, outlines with their arrays. Raises StoreDamagedError."""
        members: dict[str, list[int]] = {}
        for one in filter(is_outline, trajectories):
            members.setdefault(one.group_id, []).append(one.index)
        arrays = self.arrays(members) if members else {}
        return [with_arrays(one, arrays[one.group_id, one.index]) if is_outline(one) else one for one in trajectories]

    def images(self, group_ids: Sequence[str]) -> dict[str, bytes]:
        """Return digest -> file of these groups' images that are not their tasks' images."""
        columns = select(GROUP_IMAGES.c.digest, GROUP_IMAGES.c.image)
        found: dict[str, bytes] = {}
        for few in chunks(group_ids):
            query = columns.where(GROUP_IMAGES.c.group_id.in_(few))
            found |= self._database.read(lambda c, query=query: {row.digest: row.image for row in c.execute(query)})  # type: ignore[misc]
        return found

    def ids(self, rollout_id: str) -> list[str]:
        """Return the ids of a rollout's groups with stored trajectories, by position."""
        mine = (GROUPS.c.rollout_id == rollout_id, GROUPS.c.state.in_(SAMPLED))
        query = select(GROUPS.c.group_id).where(*mine).order_by(GROUPS.c.position)
        return self._database.read(lambda connection: list(connection.scalars(query)))

    def trajectories(self, rollout_id: str) -> list[Trajectory]:
        """Return the trajectories of a rollout's groups that are whole so far, ordered as in ``read``."""
        return [e for part in self.parts(self.ids(rollout_id)) for e in self.read(part)]

    def states(self, rollout_id: str) -> dict[str, tuple[str, int | None, str | None]]:
        """Return group id -> (state, number of the step that used it, reason of its drop)."""
        query = select(GROUPS).where(GROUPS.c.rollout_id == rollout_id).order_by(GROUPS.c.position)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return {row.group_id: (row.state, row.used_by, row.reason) for row in rows}

    def successes(self, after: int, until: int) -> dict[str, float]:
        """Task id -> share of right responses among those with a verdict, in the task's newest training group used by
        steps ``after`` + 1 to ``until``. Tasks without a verdict are left out."""
        right = func.sum(case((TRAJECTORIES.c.status == "ok", 1.0), else_=0.0))
        query = (
            select(GROUPS.c.task_id, right, func.count())
            .join(TRAJECTORIES, TRAJECTORIES.c.group_id == GROUPS.c.group_id)
            .join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            .where(GROUPS.c.used_by > after, GROUPS.c.used_by <= until, ROLLOUTS.c.kind == "train")
            .where(TRAJECTORIES.c.index != GREEDY, TRAJECTORIES.c.status.in_(("ok", "wrong")))
            .group_by(GROUPS.c.group_id, GROUPS.c.task_id, GROUPS.c.used_by, ROLLOUTS.c.sequence, GROUPS.c.position)
            .order_by(GROUPS.c.used_by, ROLLOUTS.c.sequence, GROUPS.c.position)
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return {row[0]: float(row[1]) / int(row[2]) for row in rows}

    def _with_bounds(self, row: Row[Any]) -> OutlineRow:
        """Return a row whose record an earlier version has written, with bounds computed from its arrays."""
        mine = (TRAJECTORIES.c.group_id == row.group_id, TRAJECTORIES.c.index == row._mapping["index"])
        whole = self._database.read(lambda c: c.execute(select(TRAJECTORIES).where(*mine)).one())
        columns = trajectory_to_row(trajectory_from_row(whole))
        return OutlineRow(**{name: columns[name] for name in OutlineRow.__annotations__})

    def _read_where(self, which: ColumnElement[bool]) -> list[Trajectory]:
        query = _ordered(select(TRAJECTORIES)).where(which)
        return _with_greedy(
            self._database.read(lambda connection: [trajectory_from_row(row) for row in connection.execute(query)])
        )


def outlines_of(rows: Sequence[OutlineRow]) -> list[Trajectory]:
    """Return the trajectories of ``GroupTable.outline_rows`` as ``read`` does, with arrays that have only a shape."""
    return _with_greedy([outline_from_row(row) for row in rows])


def _ordered(rows: Select[Any]) -> Select[Any]:
    """Return the query of ``rows`` of whole groups, by (rollout, position of the group, index)."""
    groups = rows.join(GROUPS, GROUPS.c.group_id == TRAJECTORIES.c.group_id)
    rollouts = groups.join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
    return rollouts.where(GROUPS.c.state.in_(SAMPLED)).order_by(
        ROLLOUTS.c.sequence, GROUPS.c.position, TRAJECTORIES.c.index
    )


def _with_greedy(found: Sequence[Trajectory]) -> list[Trajectory]:
    greedy = {trajectory.group_id: trajectory for trajectory in found if trajectory.index == GREEDY}
    return [replace(e, greedy=greedy.get(e.group_id)) for e in found if e.index != GREEDY]


def _add_images(connection: Connection, group: EndedGroup) -> None:
    """Write a group's images once each, one at a time, because a trajectory's images may take 32 MiB."""
    place = {"group_id": group.claim.group_id, "rollout_id": group.claim.rollout_id}
    files = {digest: file for trajectory in group.trajectories for digest, file in trajectory.images.items()}
    for digest, file in files.items():
        connection.execute(insert(GROUP_IMAGES), place | {"digest": digest, "image": file})


def _rows_of(group: EndedGroup) -> list[dict[str, Any]]:
    claim, rows = group.claim, [trajectory_to_row(trajectory) for trajectory in group.trajectories]
    indices, size = {row["index"] for row in rows}, claim.group_size + len(claim.indices) - claim.num_samples
    assert len(rows) == len(indices) == size and indices <= set(claim.indices), (
        f"group {claim.group_id} of size {claim.group_size} finished with indices {sorted(indices)}"
    )
    assert all(row["group_id"] == claim.group_id for row in rows), f"a trajectory of another group in {claim.group_id}"
    return rows
