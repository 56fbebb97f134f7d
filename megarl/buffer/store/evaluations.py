"""Evaluations: countable, counted or withdrawn."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, exists, not_, select

from megarl.buffer.store.journal import event_of
from megarl.buffer.store.rollouts import UNCOUNTED, delete_rollouts
from megarl.buffer.store.tables import EVENTS, GROUPS, ROLLOUTS, GroupState
from megarl.buffer.store.transactions import Transactions


class EvaluationTable:
    """Rollouts of held-out tasks."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def to_count(self, rollout_id: str | None = None) -> list[tuple[str, int, int]]:
        """Return (id, step, answers to each task) of evaluations with all groups ready; only of ``rollout_id``, if
        given.

        Reads one group per state, for any number of groups (``groups_in_order``).
        """

        def has(*states: GroupState) -> ColumnElement[bool]:
            return exists().where(GROUPS.c.rollout_id == ROLLOUTS.c.rollout_id, GROUPS.c.state.in_(states))

        others = [state for state in GroupState if state != GroupState.READY]
        query = (
            select(ROLLOUTS.c.rollout_id, ROLLOUTS.c.step, ROLLOUTS.c.group_size)
            .where(ROLLOUTS.c.kind == "eval", has(GroupState.READY), not_(has(*others)))
            .order_by(ROLLOUTS.c.sequence)
        )
        if rollout_id is not None:
            query = query.where(ROLLOUTS.c.rollout_id == rollout_id)
        return [tuple(row) for row in self._database.read(lambda connection: connection.execute(query).all())]

    def read(self, rollout_id: str) -> dict[str, Any]:
        """Return the data of a complete evaluation's event."""
        query = select(EVENTS).where(EVENTS.c.kind == "evaluation").order_by(EVENTS.c.event_id.desc())
        events = self._database.read(lambda connection: [event_of(row)["data"] for row in connection.execute(query)])
        found: dict[str, Any] = next(data for data in events if data["rollout_id"] == rollout_id)
        return found

    def uncounted(self) -> dict[str, int]:
        """Return id -> steps in its weights, for each requested evaluation not yet counted."""
        query = select(ROLLOUTS.c.rollout_id, ROLLOUTS.c.step).where(ROLLOUTS.c.rollout_id.in_(UNCOUNTED))
        return {
            row.rollout_id: row.step for row in self._database.read(lambda connection: connection.execute(query).all())
        }

    def withdraw(self, rollout_id: str) -> None:
        """Delete a rollout with all its data; claims on it can no longer be finished. Safe to repeat."""
        self._database.write(lambda connection, again: delete_rollouts(connection, [rollout_id]))
