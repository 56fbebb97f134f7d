"""Tokens of unfinished trajectories, so that the next claim of their group continues them.

An explorer appends each segment before it requests the next one, under the group's current claim. The write that
completes the group deletes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from sqlalchemy import Connection, case, delete, func, insert, select, update

from megarl.buffer.store.claims import Claim, of_claim
from megarl.buffer.store.codec import segment_from_row, segment_to_row, trajectory_from_row
from megarl.buffer.store.tables import GROUPS, SEGMENTS, TRAJECTORIES, WHOLE, GroupState, chunks
from megarl.buffer.store.transactions import Transactions, put
from megarl.core.schema import Segment, digest_of, line_of_turns


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
