"""Trajectories selected by step, reward, end, source and kind, for inspection of a run's data.

Results are ordered by rollout, group and member, in parts of bounded size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, delete, func, or_, select, true

from megarl.buffer.store.claims import RolloutKind
from megarl.buffer.store.codec import end_in, task_from_row, trajectory_from_row
from megarl.buffer.store.journal import steps_of_weights
from megarl.buffer.store.tables import (
    GROUP_IMAGES,
    GROUPS,
    IDS,
    ROLLOUTS,
    SAMPLED,
    TASKS,
    TRAJECTORIES,
    GroupState,
    chunks,
)
from megarl.buffer.store.transactions import Transactions
from megarl.core.schema import GREEDY, End, Task, Trajectory

SEARCH_S = 0.15
"""Seconds after which a search for a page of groups stops at the end of a part, with fewer groups."""
LAST_POSITION = 10**9 - 1
"""``GroupPlace.position`` after all groups of a rollout."""
USED = (GroupState.CONSUMED, GroupState.DROPPED)
"""States of groups that no later step or evaluation takes."""


@dataclass(frozen=True)
class Selection:
    """Filters on trajectories; all must match. A None bound is open."""

    steps: tuple[int | None, int | None] = (None, None)
    """First and last step, as ``StoredGroup.at_step``."""
    scores: tuple[float | None, float | None] = (None, None)
    """Least and largest score. With a bound, trajectories without a verdict do not match."""
    ends: Collection[End] = ()
    """Ends that match; empty: all."""
    sources: Collection[str] = ()
    """``data_source`` of the task; empty: all."""
    kinds: Collection[RolloutKind] = ("train", "eval")

    def of_group(self) -> list[ColumnElement[bool]]:
        """Return the conditions on a group, its rollout and its task."""
        first, last = self.steps
        found: list[ColumnElement[bool]] = [ROLLOUTS.c.kind.in_(self.kinds), GROUPS.c.state.in_(SAMPLED)]
        found += [] if first is None else [at_step >= first]
        found += [] if last is None else [at_step <= last]
        return found + ([TASKS.c.data_source.in_(self.sources)] if self.sources else [])

    def matches(self, glance: Glance) -> bool:
        """Return True if a trajectory of a selected group matches."""
        least, largest = self.scores
        if (least is not None or largest is not None) and glance.score is None:
            return False
        if glance.score is not None and (
            (least is not None and glance.score < least) or (largest is not None and glance.score > largest)
        ):
            return False
        return not self.ends or glance.end in self.ends


at_step = func.coalesce(
    GROUPS.c.used_by, case((ROLLOUTS.c.kind == "train", ROLLOUTS.c.step + 1), else_=ROLLOUTS.c.step)
)


class StoredGroup(NamedTuple):
    """A group without its trajectories."""

    group_id: str
    rollout_id: str
    position: int
    kind: RolloutKind
    at_step: int
    """Number from 1 of the step that used it or requested it; for an evaluation, steps in its weights."""
    state: str
    used_by: int | None
    reason: str | None
    """Reason of its drop."""
    version: str
    """Weights version at its request."""
    group_size: int
    task_id: str
    data_source: str


class GroupPlace(NamedTuple):
    """Place of a group in the order of requests."""

    rollout: int
    """``sequence`` of its rollout."""
    position: int
    """Position of the group in its rollout."""


class NewestGroups(NamedTuple):
    """Groups of a search, the newest first."""

    groups: list[StoredGroup]
    places: list[GroupPlace]
    """Place of each group."""
    at: GroupPlace | None
    """Place from which a search goes on; None if no other group matches."""


class Glance(NamedTuple):
    """A trajectory without its tokens."""

    group: StoredGroup
    number: int
    """``Trajectory.index``."""
    score: float | None
    """None without a verdict."""
    status: str
    nbytes: int
    """Bytes of its arrays."""
    end: End | None
    """None if not read."""


class SelectionTable:
    """Reads selected groups and trajectories, and deletes used trajectories."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def count(self, selection: Selection) -> int:
        """Return the number of groups that match the group conditions, for a progress bar."""
        query = _with_rollout(select(func.count())).where(*selection.of_group())
        return self._database.read(lambda connection: connection.scalar(query)) or 0

    def groups(self, selection: Selection) -> Iterator[list[StoredGroup]]:
        """Yield groups that match the group conditions, at most ``IDS`` together."""
        for part in _together(self._rollouts_from(selection, None, newer=True)):
            few = [rollout_id for _, rollout_id, _ in part]
            which = _groups().where(GROUPS.c.rollout_id.in_(few), *selection.of_group())
            rows = self._database.read(lambda c, which=which: c.execute(which).all())  # type: ignore[misc]
            order = {rollout_id: number for number, rollout_id in enumerate(few)}
            found = sorted(map(StoredGroup._make, rows), key=lambda each: (order[each.rollout_id], each.position))
            for start in range(0, len(found), IDS):
                yield found[start : start + IDS]

    def newest(
        self,
        selection: Selection,
        limit: int,
        words: str = "",
        start: GroupPlace | None = None,
        *,
        newer: bool = False,
        search_s: float = SEARCH_S,
    ) -> NewestGroups:
        """Return the groups next to ``start`` that have a trajectory within the bounds of ``scores``, the newest first.
        ``ends`` is not looked at.

        Args:
            limit: Most groups.
            words: Part of the task's prompt, of its reward data, or of the group's or task's id; "" is all.
            start: Place next to which the search begins, exclusive; None is the newest group, or the oldest.
            newer: Search groups newer than ``start``, not older ones.
            search_s: Seconds after which the search stops with fewer groups, at the end of a part.
        """
        begun = asked = time.monotonic()
        found: list[tuple[StoredGroup, GroupPlace]] = []
        at: GroupPlace | None = None
        sizes = [IDS]
        query = _groups().add_columns(ROLLOUTS.c.sequence).where(*selection.of_group(), *_having(selection, words))
        query = query.where(_beyond(start, newer)).order_by(*_order(newer))
        for part in _together(self._rollouts_from(selection, start, newer), lambda: sizes[-1]):
            if at is not None and (len(found) > limit or asked - begun >= search_s):
                break
            ids = [rollout_id for _, rollout_id, _ in part]
            which = query.where(GROUPS.c.rollout_id.in_(ids)).limit(limit + 1 - len(found))
            for row in self._database.read(lambda c, which=which: c.execute(which).all()):  # type: ignore[misc]
                group = StoredGroup(*row[:-1])
                found.append((group, GroupPlace(row[-1], group.position)))
            at = GroupPlace(part[-1][0], LAST_POSITION if newer else 0)
            took, asked = time.monotonic() - asked, time.monotonic()
            sizes.append(sizes[-1] * (2 if took < search_s / 8 else 1))
        else:
            at = None
        if len(found) > limit:
            found = found[:limit]
            at = found[-1][1]
        found = found[::-1] if newer else found
        return NewestGroups([group for group, _ in found], [place for _, place in found], at)

    def _rollouts_from(
        self, selection: Selection, start: GroupPlace | None, newer: bool
    ) -> Iterator[tuple[int, str, int]]:
        """Yield (sequence, id, number of groups) of rollouts from ``start`` on."""
        sequence = ROLLOUTS.c.sequence
        query = select(sequence, ROLLOUTS.c.rollout_id, ROLLOUTS.c.num_groups).order_by(_order(newer)[0]).limit(IDS)
        query = query.where(ROLLOUTS.c.kind.in_(selection.kinds))
        last = None
        if start is not None:  # groups of its rollout may be left
            left = start.position != (LAST_POSITION if newer else 0)
            last = start.rollout + (-left if newer else left)
        while True:
            which = query if last is None else query.where(sequence > last if newer else sequence < last)
            rows = self._database.read(lambda c, which=which: c.execute(which).all())  # type: ignore[misc]
            yield from map(tuple, rows)
            if len(rows) < IDS:
                return
            last = rows[-1][0]

    def group(self, group_id: str) -> StoredGroup | None:
        """Return the group with this id, in any state; None if missing."""
        query = _groups().where(GROUPS.c.group_id == group_id)
        found = self._database.read(lambda connection: connection.execute(query).first())
        return None if found is None else StoredGroup(*found)

    def glances(self, groups: Sequence[StoredGroup], *, ends: bool) -> list[Glance]:
        """Return the trajectories of at most ``IDS`` groups without tokens and without greedy answers.

        Args:
            ends: Read each trajectory's end, some milliseconds per thousand.
        """
        columns: list[ColumnElement[Any]] = [TRAJECTORIES.c[name] for name in ("group_id", "score", "status")]
        columns += [TRAJECTORIES.c.index.label("number"), func.length(TRAJECTORIES.c.tensors).label("nbytes")]
        query = select(*columns, *([TRAJECTORIES.c.record] if ends else [])).where(TRAJECTORIES.c.index != GREEDY)
        query = query.where(TRAJECTORIES.c.group_id.in_([group.group_id for group in groups]))
        members: dict[str, list[Glance]] = {group.group_id: [] for group in groups}
        of_id = {group.group_id: group for group in groups}

        def work(connection: Connection) -> None:
            for found in members.values():  # a retried read starts again
                found.clear()
            for row in connection.execute(query):
                end = end_in(row.status, row.record) if ends else None
                glance = Glance(of_id[row.group_id], row.number, row.score, row.status, row.nbytes, end)
                members[row.group_id].append(glance)

        self._database.read(work)
        return [glance for found in members.values() for glance in sorted(found, key=lambda each: each.number)]

    def members(self, group_ids: Sequence[str]) -> list[Trajectory]:
        """Return the stored trajectories of groups, a greedy answer before the others of its group."""
        query = select(TRAJECTORIES).order_by(TRAJECTORIES.c.index)
        found: dict[str, list[Trajectory]] = {group_id: [] for group_id in group_ids}
        for few in chunks(group_ids):
            rows = query.where(TRAJECTORIES.c.group_id.in_(few))
            for each in self._database.read(lambda c, rows=rows: [trajectory_from_row(row) for row in c.execute(rows)]):  # type: ignore[misc]
                found[each.group_id].append(each)
        return [each for members in found.values() for each in members]

    def tasks_named(self, task_ids: Collection[str]) -> dict[str, Task]:
        """Return existing tasks by id, without images."""
        found: dict[str, Task] = {}
        for few in chunks(sorted(task_ids)):
            query = select(TASKS).where(TASKS.c.task_id.in_(few))
            rows: Sequence[Row[Any]] = self._database.read(lambda c, query=query: c.execute(query).all())  # type: ignore[misc]
            found |= {row.task_id: task_from_row(row) for row in rows}
        return found

    def needed_again(self, groups: Sequence[StoredGroup], checkpoints: Collection[int]) -> set[str]:
        """Return ids of training groups that a resume from one of the ``checkpoints`` (steps) would use again: sampled
        with earlier weights and used by a later step."""
        later = [and_(GROUPS.c.used_by > step, steps_of_weights() < step) for step in checkpoints]
        query = select(GROUPS.c.group_id).join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
        ids = [group.group_id for group in groups if group.kind == "train"]
        found: set[str] = set()
        for few in chunks(ids) if later else ():
            which = query.where(GROUPS.c.group_id.in_(few), or_(*later))
            found |= self._database.read(lambda c, which=which: set(c.scalars(which)))  # type: ignore[misc]
        return found

    def delete_trajectories(self, group_ids: Sequence[str]) -> int:
        """Delete the trajectories of at most ``IDS`` used groups, in one transaction; return their number.

        Groups keep their state and step; unused groups are unchanged. Safe to repeat: the number counts only remaining
        trajectories.
        """
        used = (GROUPS.c.group_id.in_(group_ids), GROUPS.c.state.in_(USED))

        def work(connection: Connection, again: bool) -> int:
            # Locks on PostgreSQL against a job start that makes groups ready again.
            ids = list(connection.scalars(select(GROUPS.c.group_id).where(*used).with_for_update()))
            connection.execute(delete(GROUP_IMAGES).where(GROUP_IMAGES.c.group_id.in_(ids)))
            return connection.execute(delete(TRAJECTORIES).where(TRAJECTORIES.c.group_id.in_(ids))).rowcount

        return self._database.write(work)


def _together(
    rollouts: Iterable[tuple[int, str, int]], most: Callable[[], int] = lambda: IDS
) -> Iterator[list[tuple[int, str, int]]]:
    """Split rollouts (sequence, id, number of groups) into parts of about ``most`` groups and at most ``IDS`` rollouts,
    at least one rollout each."""
    few: list[tuple[int, str, int]] = []
    room = most()
    for rollout in rollouts:
        if few and (rollout[2] > room or len(few) == IDS):
            yield few
            few, room = [], most()
        few.append(rollout)
        room -= rollout[2]
    if few:
        yield few


def _having(selection: Selection, words: str) -> list[ColumnElement[bool]]:
    """Return the conditions on a group's trajectories and texts, as ``SelectionTable.newest``."""
    found: list[ColumnElement[bool]] = []
    least, largest = selection.scores
    if least is not None or largest is not None:
        scored = select(TRAJECTORIES.c.score).where(TRAJECTORIES.c.group_id == GROUPS.c.group_id)
        scored = scored.where(TRAJECTORIES.c.index != GREEDY)
        scored = scored if least is None else scored.where(TRAJECTORIES.c.score >= least)
        found.append((scored if largest is None else scored.where(TRAJECTORIES.c.score <= largest)).exists())
    if words:
        columns = (TASKS.c.prompt, TASKS.c.reward_model, GROUPS.c.task_id, GROUPS.c.group_id)
        found.append(or_(*(column.contains(words, autoescape=True) for column in columns)))
    return found


def _beyond(start: GroupPlace | None, newer: bool) -> ColumnElement[bool]:
    """Return the condition on groups newer or older than ``start``."""
    if start is None:
        return true()
    sequence, position = ROLLOUTS.c.sequence, GROUPS.c.position
    if newer:
        return or_(sequence > start.rollout, and_(sequence == start.rollout, position > start.position))
    return or_(sequence < start.rollout, and_(sequence == start.rollout, position < start.position))


def _order(newer: bool) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    columns = (ROLLOUTS.c.sequence, GROUPS.c.position)
    return columns if newer else (columns[0].desc(), columns[1].desc())


def _with_rollout(query: Select[Any]) -> Select[Any]:
    joined = query.select_from(GROUPS).join(ROLLOUTS, ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
    return joined.outerjoin(TASKS, TASKS.c.task_id == GROUPS.c.task_id)


def _groups() -> Select[Any]:
    """Query of ``StoredGroup``s."""
    g, r = GROUPS.c, ROLLOUTS.c
    columns = (g.group_id, g.rollout_id, g.position, r.kind, at_step, g.state, g.used_by, g.reason, r.version)
    source = func.coalesce(TASKS.c.data_source, "")  # tasks may have been replaced since
    return _with_rollout(select(*columns, r.group_size, g.task_id, source))
