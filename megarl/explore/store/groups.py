"""The explorer's side of rollouts: groups claimed, finished, given back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, update

from megarl.core.schema import Trajectory
from megarl.explore.store import claims
from megarl.explore.store.claims import Claim, images_of
from megarl.explore.store.codec import trajectory_to_row
from megarl.explore.store.handle import Handle
from megarl.explore.store.tables import GROUPS

LEASE_S = 3600.0
"""Age after which a claim is taken from a worker that never came back. A live worker's claims are much younger."""


class GroupTable(Handle):
    """Groups that explorers claim and finish."""

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
