"""Claims of groups: the work of ``Store.groups.claim`` and ``put`` inside their transaction."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, select, update

from megarl.buffer.store.codec import dumps, task_from_row
from megarl.buffer.store.tables import (
    GROUPS,
    ROLLOUT_METRICS,
    ROLLOUTS,
    SAMPLED,
    STALE,
    TASK_IMAGES,
    TASKS,
    VERSIONS,
    GroupState,
)
from megarl.buffer.store.transactions import put
from megarl.core.schema import GREEDY, Segment, Task, Trajectory, WeightsVersion

RolloutKind = Literal["train", "eval"]


def samples_of(group_size: int, sampling: Mapping[str, Any]) -> int:
    """Return the number of answers sampled for a group, including spare ones (``rollout.spare``)."""
    return group_size + int(sampling.get("spare", 0))


@dataclass(frozen=True)
class Claim:
    """A worker's claim on one group: what to generate, and the right to write its trajectories."""

    rollout_id: str
    kind: RolloutKind
    step: int
    version: WeightsVersion
    group_id: str
    position: int
    group_size: int
    sampling: dict[str, Any]
    task: Task
    worker: str
    token: str
    """Token of the call that claimed the group."""
    attempt: int
    """Number of claims of this group, this one included."""
    segments: Mapping[int, tuple[Segment, ...]] = field(default_factory=dict)
    """Tokens of unfinished trajectories from earlier claims, by index."""
    live: WeightsVersion | None = None
    """First weights that every engine loaded after the trainer's start or rollback; None before. Some earlier weights
    no longer exist, and an engine may still have them."""

    @property
    def oldest(self) -> WeightsVersion:
        """Oldest weights that may sample the group."""
        return self.version if self.live is None else max(self.version, self.live)

    @property
    def num_samples(self) -> int:
        """Number of answers to sample; the first ``group_size`` to end complete the group."""
        return samples_of(self.group_size, self.sampling)

    @property
    def indices(self) -> list[int]:
        """Indices of the requested answers: the samples, and ``GREEDY`` if the rollout includes one."""
        return [*([GREEDY] if self.sampling.get("greedy") else []), *range(self.num_samples)]


@dataclass(frozen=True)
class EndedGroup:
    """A claimed group whose trajectories have all ended, as ``Store.groups.put_all`` takes it."""

    claim: Claim
    trajectories: Sequence[Trajectory]
    metrics: Mapping[str, float] | None = None
    """Replaces the worker's earlier metrics of the rollout."""


TRAINED = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.kind == "train")
"""Training rollouts."""
PENDING = GROUPS.c.state == GroupState.PENDING
"""Unclaimed groups."""


def is_held_by(workers: Collection[str]) -> ColumnElement[bool]:
    """Return the condition on groups claimed by one of ``workers``; groups of dead workers are free too."""
    return and_(GROUPS.c.state == GroupState.CLAIMED, GROUPS.c.claimed_by.in_(workers))


_WITH_ROLLOUT = select(GROUPS, *(c for c in ROLLOUTS.c if c.name not in GROUPS.c)).join(
    ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id
)
_IN_ORDER = (ROLLOUTS.c.sequence, GROUPS.c.position)


def claim(
    connection: Connection,
    expired: ColumnElement[bool],
    limit: int,
    max_samples: int | None,
    held: Mapping[str, Any],
    evaluations: bool,
) -> list[Row[Any]]:
    """Mark groups as claimed with the columns ``held`` and return them with their rollouts' columns, in order.

    It reads at most as many pending groups as it may claim.
    """
    groups: list[Row[Any]] = []
    for rollout_id in _open_rollouts(connection, expired, evaluations):
        if len(groups) < limit:
            groups += _free_groups(connection, rollout_id, expired, limit - len(groups))
    if max_samples is not None:
        samples = itertools.accumulate(samples_of(g.group_size, json.loads(g.sampling)) for g in groups)
        groups = [g for i, (g, n) in enumerate(zip(groups, samples, strict=True)) if i == 0 or n <= max_samples]
    ids = [group.group_id for group in groups]
    # ``reached`` described the trajectories of an earlier claim.
    claimed = {"state": GroupState.CLAIMED, **held, "attempt": GROUPS.c.attempt + 1, "reached": None}
    connection.execute(update(GROUPS).where(GROUPS.c.group_id.in_(ids)).values(claimed))
    return held_by(connection, held["claim_token"])


def _open_rollouts(connection: Connection, expired: ColumnElement[bool], evaluations: bool) -> list[str]:
    """Return ids of rollouts with free groups: evaluations first if wanted, then in order. Training rollouts are left
    out while engines may have weights that no longer exist. Reads one pending group per rollout."""
    found = set(connection.scalars(select(GROUPS.c.rollout_id).where(expired)))
    least, last = select(func.min(GROUPS.c.rollout_id)).where(PENDING), ""
    while (following := connection.scalar(least.where(GROUPS.c.rollout_id > last))) is not None:
        found.add(last := following)
    trains = case((ROLLOUTS.c.kind == "train", 1), else_=0)
    query = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.rollout_id.in_(found)).order_by(trains, ROLLOUTS.c.sequence)
    wanted = [kind for kind, is_wanted in (("eval", evaluations), ("train", not _is_stale(connection))) if is_wanted]
    return list(connection.scalars(query.where(ROLLOUTS.c.kind.in_(wanted))))


def _is_stale(connection: Connection) -> bool:
    """Return True between a trainer's resume and its first publication."""
    some = select(VERSIONS.c.version).limit(1)
    has = [connection.scalar(some.where(VERSIONS.c.live == live)) is not None for live in (1, STALE)]
    return has == [False, True]


def first_live(connection: Connection) -> WeightsVersion | None:
    """Return the first version that all engines proved to have since the trainer's start or rollback."""
    query = select(VERSIONS.c.version).where(VERSIONS.c.live == 1).order_by(VERSIONS.c.attempt, VERSIONS.c.n)
    version = connection.scalar(query.limit(1))
    return None if version is None else WeightsVersion.parse(version)


def _free_groups(connection: Connection, rollout_id: str, expired: ColumnElement[bool], limit: int) -> list[Row[Any]]:
    """Return up to ``limit`` free groups of a rollout, by position. Two statements, one per state, can use an index."""
    query = (
        _WITH_ROLLOUT.where(GROUPS.c.rollout_id == rollout_id)
        .order_by(GROUPS.c.position)
        .limit(limit)
        .with_for_update(skip_locked=True, of=GROUPS)  # SQLite has no such clause; BEGIN IMMEDIATE replaces it
    )
    found = [group for free in (PENDING, expired) for group in connection.execute(query.where(free))]
    return sorted(found, key=attrgetter("position"))[:limit]


def held_by(connection: Connection, token: str) -> list[Row[Any]]:
    """Return the unfinished groups claimed with this token, as :func:`claim` does."""
    mine = (GROUPS.c.state == GroupState.CLAIMED, GROUPS.c.claim_token == token)
    return list(connection.execute(_WITH_ROLLOUT.where(*mine).order_by(*_IN_ORDER)))


def claims_of(
    groups: Sequence[Row[Any]],
    tasks: Sequence[Row[Any]],
    images: Mapping[str, tuple[bytes, ...]],
    segments: Mapping[str, Mapping[int, tuple[Segment, ...]]],
    live: WeightsVersion | None,
) -> list[Claim]:
    """Return claims on ``groups`` with their tasks and earlier segments; ``live``: for training."""
    of_id = {row.task_id: task_from_row(row, images.get(row.task_id, ())) for row in tasks}
    return [
        Claim(
            rollout_id=group.rollout_id,
            kind=group.kind,
            step=group.step,
            version=WeightsVersion.parse(group.version),
            group_id=group.group_id,
            position=group.position,
            group_size=group.group_size,
            sampling=json.loads(group.sampling),
            task=of_id[group.task_id],
            worker=group.claimed_by,
            token=group.claim_token,
            attempt=group.attempt,
            segments=segments.get(group.group_id, {}),
            live=live if group.kind == "train" else None,
        )
        for group in groups
    ]


def make_ready(connection: Connection, group: EndedGroup) -> bool:
    """Mark a group as ready, or as awaiting rewards, if ``claim`` still holds it. Call it before its trajectories are
    written: another request of the rollout also deletes the group's row first, so it waits for this transaction."""
    claim, claimed = group.claim, GROUPS.c.state == GroupState.CLAIMED
    late = claim.kind == "train" and any(e.reward.status == "late" for e in group.trajectories)
    ready = {"state": GroupState.AWAITING if late else GroupState.READY, "ended_at": time.time()}
    return connection.execute(update(GROUPS).where(*of_claim(claim), claimed).values(ready)).rowcount == 1


def is_ready(connection: Connection, claim: Claim) -> bool:
    """Return True if this claim has made its group ready: a finished group keeps its claim's token."""
    query = select(GROUPS.c.group_id).where(*of_claim(claim), GROUPS.c.state.in_(SAMPLED))
    return connection.execute(query).first() is not None


def of_claim(claim: Claim) -> tuple[ColumnElement[bool], ...]:
    """Return the condition on a claim's group that holds only while the claim is current."""
    return GROUPS.c.group_id == claim.group_id, GROUPS.c.claim_token == claim.token


def report(connection: Connection, ended: Sequence[EndedGroup]) -> None:
    """Write the last metrics that each worker reported for its rollouts."""
    last = {(g.claim.rollout_id, g.claim.worker): g.metrics for g in ended if g.metrics is not None}
    rows = [
        {"rollout_id": rollout_id, "worker": worker, "metrics": dumps(dict(metrics))}
        for (rollout_id, worker), metrics in last.items()
    ]
    if rows:
        put(connection, ROLLOUT_METRICS, rows)


def images_of(connection: Connection, task_ids: Select[Any] | Collection[str]) -> dict[str, tuple[bytes, ...]]:
    """Return task id -> images in order, for tasks with images."""
    query = select(TASK_IMAGES).where(TASK_IMAGES.c.task_id.in_(task_ids)).order_by(TASK_IMAGES.c.position)
    found: dict[str, tuple[bytes, ...]] = {}
    for row in connection.execute(query):
        found[row.task_id] = (*found.get(row.task_id, ()), row.image)
    return found


def tasks_of(connection: Connection, task_ids: Collection[str]) -> list[Row[Any]]:
    return list(connection.execute(select(TASKS).where(TASKS.c.task_id.in_(task_ids))))
