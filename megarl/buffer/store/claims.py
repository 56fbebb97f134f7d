"""Claims of groups, and tokens of their unfinished trajectories for the next claim.

An explorer appends each segment before it requests the next one, under the group's current claim. The write that
completes the group deletes them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, delete, func, insert, select, update

from megarl.buffer.store.codec import dumps, segment_from_row, segment_to_row, task_from_row, trajectory_from_row
from megarl.buffer.store.tables import (
    GROUPS,
    ROLLOUT_METRICS,
    ROLLOUTS,
    SAMPLED,
    SEGMENTS,
    STALE,
    TASK_IMAGES,
    TASKS,
    TRAJECTORIES,
    VERSIONS,
    WHOLE,
    GroupState,
    chunks,
)
from megarl.buffer.store.transactions import Transactions, put
from megarl.core.schema import GREEDY, Segment, Task, Trajectory, WeightsVersion, digest_of, line_of_turns

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


class SegmentTable:
    """Segments of claimed groups, and the progress of their trajectories."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def append(self, segments: Sequence[tuple[Claim, Segment]]) -> list[bool]:
        """Write segments in one transaction; return False for each with an outdated claim. Safe to repeat: the same
        rows are written again."""
        rows = [segment_to_row(claim.group_id, claim.rollout_id, segment) for claim, segment in segments]
        claims = {claim.group_id: claim for claim, _ in segments}

        def work(connection: Connection, again: bool) -> list[bool]:
            held = _held(connection, claims.values())
            ours = [claim.group_id in held for claim, _ in segments]
            put(connection, SEGMENTS, [row for row, is_ours in zip(rows, ours, strict=True) if is_ours])
            return ours

        return self._database.write(work)

    def forget(self, claim: Claim, index: int, from_turn: int = 0) -> None:
        """Delete the segments of a restarted trajectory, from response ``from_turn`` on. Safe to repeat."""

        def work(connection: Connection, again: bool) -> None:
            if _held(connection, [claim]):
                of_trajectory = (SEGMENTS.c.group_id == claim.group_id, SEGMENTS.c.index == index)
                connection.execute(delete(SEGMENTS).where(*of_trajectory, SEGMENTS.c.turn >= from_turn))
                connection.execute(update(GROUPS).where(*of_claim(claim)).values(reached=None))

        self._database.write(work)

    def reach(self, claim: Claim, step: int) -> None:
        """Record that no trajectory of the group gets further tokens from the weights of ``step`` steps. Safe to
        repeat."""
        values = {"reached": step}
        self._database.write(
            lambda connection, again: connection.execute(update(GROUPS).where(*of_claim(claim)).values(values))
        )

    def reached(self, rollout_id: str, step: int) -> tuple[int, int]:
        """Return (groups that are whole or have reached ``step``, all groups)."""
        there = case((GROUPS.c.state.in_((*WHOLE, GroupState.AWAITING)), 1), (GROUPS.c.reached >= step, 1), else_=0)
        query = select(func.sum(there), func.count()).where(GROUPS.c.rollout_id == rollout_id)
        row = self._database.read(lambda connection: connection.execute(query).one())
        return int(row[0] or 0), int(row[1])

    def read(self, group_ids: Sequence[str]) -> dict[str, dict[int, tuple[Segment, ...]]]:
        """Return group id -> trajectory index -> segments in order."""
        found: dict[str, dict[int, tuple[Segment, ...]]] = {}
        for few in chunks(group_ids):
            query = select(SEGMENTS).where(SEGMENTS.c.group_id.in_(few))
            for row in self._database.read(lambda connection, query=query: connection.execute(query).all()):  # type: ignore[misc]
                of_index = found.setdefault(row.group_id, {})
                of_index[row.index] = (*of_index.get(row.index, ()), segment_from_row(row))
        return {
            group_id: {index: tuple(sorted(few, key=attrgetter("turn", "start"))) for index, few in of_index.items()}
            for group_id, of_index in found.items()
        }


def _held(connection: Connection, claims: Collection[Claim]) -> set[str]:
    """Return ids of the groups still held by these claims, and lock their rows against deletion."""
    tokens = {claim.group_id: claim.token for claim in claims}
    found: set[str] = set()
    for few in chunks(sorted(tokens)):  # in one order, to prevent deadlocks between explorers
        query = select(GROUPS.c.group_id, GROUPS.c.claim_token).where(
            GROUPS.c.group_id.in_(few), GROUPS.c.state == GroupState.CLAIMED
        )
        rows = connection.execute(query.order_by(GROUPS.c.group_id).with_for_update())
        found |= {row.group_id for row in rows if row.claim_token == tokens[row.group_id]}
    return found


def cut_segments(connection: Connection, group_ids: Sequence[str], dead: Collection[str]) -> None:
    """Truncate all trajectories of groups before their first token of a ``dead`` version, and store the rest as
    segments."""
    ended = select(TRAJECTORIES).where(TRAJECTORIES.c.group_id.in_(group_ids))
    unfinished = select(SEGMENTS).where(SEGMENTS.c.group_id.in_(group_ids))
    kept: dict[tuple[str, str, int], list[Segment]] = {}
    row: Any
    for row in connection.execute(ended):
        kept[row.group_id, row.rollout_id, row.index] = list(segments_of(row))
    for row in connection.execute(unfinished):
        kept.setdefault((row.group_id, row.rollout_id, row.index), []).append(segment_from_row(row))
    rows = [
        segment_to_row(group_id, rollout_id, segment)
        for (group_id, rollout_id, _), segments in kept.items()
        for segment in until_cut(segments, dead)
    ]
    connection.execute(delete(SEGMENTS).where(SEGMENTS.c.group_id.in_(group_ids)))
    if rows:
        connection.execute(insert(SEGMENTS), rows)


def until_cut(segments: Iterable[Segment], dead: Collection[str]) -> Iterator[Segment]:
    """Yield the segments of one trajectory up to its first token of a ``dead`` version."""
    for segment in sorted(segments, key=attrgetter("turn", "start")):
        kept = segment.before(dead)
        if kept is not None:
            yield kept
        if kept is not segment:
            return


def segments_of(row: Any) -> Iterator[Segment]:
    """Yield each response of the trajectory in a row as one segment, numbered by its place among them.

    Contexts with images have expanded placeholders here, so no requested context matches them.
    """
    trajectory = trajectory_from_row(row)
    turns = trajectory.turns
    model = [turn for turn in turns if turn.author == "model"]
    for number, turn in enumerate(model):
        assert turn.logp is not None
        line = [turns[i] for i in line_of_turns(turns, turn.follows)]
        shown = [digest for before in line for digest in before.images]
        yield Segment(
            trajectory.index,
            number,
            0,
            digest_of(np.concatenate([before.token_ids for before in line]), shown),
            turn.token_ids,
            turn.logp,
            turn.spans,
            turn.finish_reason,
            routing=turn.routing,
        )
