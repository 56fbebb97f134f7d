"""Rewards that arrive after their trajectories: from a person, a remote judge or a batch verifier."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, func, select, update

from megarl.buffer.store.claims import images_of, tasks_of
from megarl.buffer.store.codec import GIVEN_LATER, dumps, task_from_row
from megarl.buffer.store.groups import GroupTable
from megarl.buffer.store.tables import GROUPS, IDS, TRAJECTORIES, GroupState, chunks
from megarl.buffer.store.transactions import Transactions
from megarl.core.schema import Reward, Task, Trajectory


class GivenReward(NamedTuple):
    """A reward for one trajectory."""

    group_id: str
    position: int
    """``Trajectory.index``."""
    claim: str
    """Token of the claim that sampled it, since the group may have been sampled again."""
    reward: Reward


class AwaitingReward(NamedTuple):
    """A trajectory that awaits a reward."""

    task: Task
    trajectory: Trajectory
    claim: str


class Rewarded(NamedTuple):
    """Result of giving rewards."""

    written: int
    ready: int
    """Groups that now have all their rewards."""
    left_out: tuple[tuple[str, int], ...]
    """(group, index) of trajectories that awaited no reward: already rewarded, used without one, sampled again, or not
    in the store."""


class LateRewards:
    """Groups that await rewards."""

    def __init__(self, database: Transactions, groups: GroupTable) -> None:
        self._database = database
        self._groups = groups

    def awaiting(self) -> Iterator[list[AwaitingReward]]:
        """Yield trajectories that await a reward, in parts of bounded size."""
        columns = (GROUPS.c.group_id, GROUPS.c.claim_token)
        query = select(*columns).where(GROUPS.c.state == GroupState.AWAITING).order_by(GROUPS.c.ended_at)
        claims = {row.group_id: row.claim_token for row in self._database.read(lambda c: c.execute(query).all())}
        for few in self._groups.parts(list(claims)):
            sampled = self._groups.read(few)
            greedy = {e.group_id: e.greedy for e in sampled if e.greedy is not None}
            members = [*greedy.values(), *sampled]
            found = [e for e in members if e.reward.status == "late"]
            ids = {e.task_id for e in found}
            tasks, images = self._database.read(lambda c, ids=ids: (tasks_of(c, ids), images_of(c, ids)))  # type: ignore[misc]
            of_id = {row.task_id: task_from_row(row, images.get(row.task_id, ())) for row in tasks}
            yield [AwaitingReward(of_id[e.task_id], e, claims[e.group_id]) for e in found]

    def count(self) -> int:
        """Return the number of responses that await a reward while explorers have nothing to sample; else 0.

        Groups that have used up their token budget do not count as being sampled: they wait for later weights.
        """
        open_ = GROUPS.c.state.in_((GroupState.PENDING, GroupState.CLAIMED))
        being_sampled = select(GROUPS.c.group_id).where(open_, GROUPS.c.reached.is_(None)).limit(1)
        late = (
            select(func.count())
            .select_from(TRAJECTORIES.join(GROUPS, GROUPS.c.group_id == TRAJECTORIES.c.group_id))
            .where(GROUPS.c.state == GroupState.AWAITING, TRAJECTORIES.c.status == "late")
        )
        return self._database.read(
            lambda c: 0 if c.execute(being_sampled).first() else int(c.execute(late).scalar_one())
        )

    def give(self, given: Sequence[GivenReward]) -> Rewarded:
        """Write rewards of trajectories that await one, and mark complete groups ready, in one transaction.

        Safe to repeat: rewarded trajectories stay unchanged.
        """
        of_group: dict[tuple[str, str], dict[int, Reward]] = {}
        for each in given:
            of_group.setdefault((each.group_id, each.claim), {})[each.position] = each.reward

        def work(connection: Connection, again: bool) -> Rewarded:
            written, ready = set[tuple[str, int]](), 0
            for few in chunks(sorted({group for group, _ in of_group})):
                waiting = (GROUPS.c.group_id.in_(few), GROUPS.c.state == GroupState.AWAITING)
                query = select(GROUPS.c.group_id, GROUPS.c.claim_token).where(*waiting).with_for_update()
                rewards = {
                    row.group_id: of_group[row.group_id, row.claim_token]
                    for row in connection.execute(query)
                    if (row.group_id, row.claim_token) in of_group
                }
                left = _late(connection, set(rewards))
                new = {(group, index): record for (group, index), record in left.items() if index in rewards[group]}
                _write(connection, [(*key, rewards[key[0]][key[1]], record) for key, record in new.items()])
                whole = rewards.keys() - {group for group, index in left.keys() - new.keys()}
                now = {"state": GroupState.READY, "ended_at": time.time()}
                connection.execute(update(GROUPS).where(GROUPS.c.group_id.in_(whole)).values(now))
                written |= new.keys()
                ready += len(whole)
            asked = [(each.group_id, each.position) for each in given]
            return Rewarded(len(written), ready, tuple(key for key in asked if key not in written))

        return self._database.write(work)

    def stop_waiting(self, group_ids: Sequence[str]) -> None:
        """Mark groups ready without the rewards that they await; steps then take them without those rewards. Safe to
        repeat."""

        def work(connection: Connection, again: bool) -> None:
            for few in chunks(group_ids):
                which = (GROUPS.c.group_id.in_(few), GROUPS.c.state == GroupState.AWAITING)
                connection.execute(update(GROUPS).where(*which).values(state=GroupState.READY))

        self._database.write(work)


def _late(connection: Connection, group_ids: set[str]) -> dict[tuple[str, int], str]:
    """Return (group, index) -> record of these groups' trajectories without a reward."""
    columns = (TRAJECTORIES.c.group_id, TRAJECTORIES.c.index.label("position"), TRAJECTORIES.c.record)
    query = select(*columns).where(TRAJECTORIES.c.group_id.in_(group_ids), TRAJECTORIES.c.status == "late")
    return {(row.group_id, row.position): row.record for row in connection.execute(query)}


def _write(connection: Connection, rewards: Sequence[tuple[str, int, Reward, str]]) -> None:
    if not rewards:
        return
    which = (TRAJECTORIES.c.group_id == bindparam("of"), TRAJECTORIES.c.index == bindparam("at"))
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("score", "status", "record")}
    rows = []
    for group, index, reward, text in rewards:
        record = json.loads(text)
        metadata = {**record["metadata"], GIVEN_LATER: True}
        rows.append(
            {
                "of": group,
                "at": index,
                "new_score": reward.score if math.isfinite(reward.score) else None,
                "new_status": reward.status,
                "new_record": dumps({**record, "parts": reward.parts, "metadata": metadata}),
            }
        )
    for start in range(0, len(rows), IDS):
        connection.execute(update(TRAJECTORIES).where(*which).values(values), rows[start : start + IDS])
