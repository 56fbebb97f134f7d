"""Rewards that arrive after their trajectories: of a person, a judge elsewhere, a verifier that works in batches."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, select, update

from megarl.core.schema import Reward, Task, Trajectory
from megarl.explore.store.buffer import Buffer
from megarl.explore.store.claims import images_of, tasks_of
from megarl.explore.store.codec import dumps, task_from_row
from megarl.explore.store.handle import IDS, chunks
from megarl.explore.store.tables import GROUPS, TRAJECTORIES, GroupState


class GivenReward(NamedTuple):
    """A reward for one trajectory."""

    group_id: str
    position: int
    """``Trajectory.index``."""
    reward: Reward


class Rewarded(NamedTuple):
    """Result of giving rewards."""

    written: int
    ready: int
    """Groups that have all their rewards now."""
    left_out: tuple[tuple[str, int], ...]
    """(group, index) of trajectories that awaited none: already rewarded, used without, or not in the store."""


class LateRewards(Buffer):
    """Groups that await rewards."""

    def awaiting(self) -> Iterator[list[tuple[Task, Trajectory]]]:
        """Trajectories that await a reward, with their tasks, in parts of bounded size."""
        query = select(GROUPS.c.group_id).where(GROUPS.c.state == GroupState.AWAITING).order_by(GROUPS.c.ended_at)
        for few in self.parts(self._read(lambda connection: list(connection.scalars(query)))):
            found = [e for e in self.read(few) if e.reward.status == "late"]
            ids = {e.task_id for e in found}
            tasks, images = self._read(lambda c, ids=ids: (tasks_of(c, ids), images_of(c, ids)))  # type: ignore[misc]
            of_id = {row.task_id: task_from_row(row, images.get(row.task_id, ())) for row in tasks}
            yield [(of_id[e.task_id], e) for e in found]

    def reward(self, given: Sequence[GivenReward]) -> Rewarded:
        """Write rewards of trajectories that await one, and make groups ready that have all, in one transaction.

        Safe to repeat: what has its reward is left as it is.
        """
        of_group: dict[str, dict[int, Reward]] = {}
        for each in given:
            of_group.setdefault(each.group_id, {})[each.position] = each.reward

        def work(connection: Connection, again: bool) -> Rewarded:
            written, ready = set[tuple[str, int]](), 0
            for few in chunks(list(of_group)):
                waiting = (GROUPS.c.group_id.in_(few), GROUPS.c.state == GroupState.AWAITING)
                held = set(connection.scalars(select(GROUPS.c.group_id).where(*waiting).with_for_update()))
                left = _late(connection, held)
                new = {(group, index): record for (group, index), record in left.items() if index in of_group[group]}
                _write(connection, [(*key, of_group[key[0]][key[1]], record) for key, record in new.items()])
                whole = held - {group for group, index in left.keys() - new.keys()}
                now = {"state": GroupState.READY, "ended_at": time.time()}
                connection.execute(update(GROUPS).where(GROUPS.c.group_id.in_(whole)).values(now))
                written |= new.keys()
                ready += len(whole)
            asked = [(each.group_id, each.position) for each in given]
            return Rewarded(len(written), ready, tuple(key for key in asked if key not in written))

        return self._write(work)


def _late(connection: Connection, group_ids: set[str]) -> dict[tuple[str, int], str]:
    """(group, index) -> record of these groups' trajectories without a reward."""
    columns = (TRAJECTORIES.c.group_id, TRAJECTORIES.c.index.label("position"), TRAJECTORIES.c.record)
    query = select(*columns).where(TRAJECTORIES.c.group_id.in_(group_ids), TRAJECTORIES.c.status == "late")
    return {(row.group_id, row.position): row.record for row in connection.execute(query)}


def _write(connection: Connection, rewards: Sequence[tuple[str, int, Reward, str]]) -> None:
    if not rewards:
        return
    which = (TRAJECTORIES.c.group_id == bindparam("of"), TRAJECTORIES.c.index == bindparam("at"))
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("score", "status", "record")}
    rows = [
        {
            "of": group,
            "at": index,
            "new_score": reward.score if math.isfinite(reward.score) else None,
            "new_status": reward.status,
            "new_record": dumps({**json.loads(record), "parts": reward.parts}),
        }
        for group, index, reward, record in rewards
    ]
    for start in range(0, len(rows), IDS):
        connection.execute(update(TRAJECTORIES).where(*which).values(values), rows[start : start + IDS])
