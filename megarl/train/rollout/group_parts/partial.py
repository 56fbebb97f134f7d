"""Responses that continue with later weights after a token budget (``rollout.budget_tokens``; Kimi k1.5)."""

from __future__ import annotations

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Store
from megarl.config import Config
from megarl.train.rollout.group_part import Awaited, GroupPart, rollout_id


class BudgetAhead(GroupPart):
    """Ends the wait for groups requested ahead once they have used up the budget of the current weights."""

    def __init__(self, config: Config, store: Store) -> None:
        self._pacing, self._store = Pacing.of(config.sync), store

    def look_ahead(self, ahead: int, step: int) -> Awaited | None:
        published = self._pacing.published(step)
        if ahead < published + self._pacing.interval:
            return None
        done, total = self._store.segments.reached(rollout_id(ahead), published)
        return Awaited(done, total, done == total)
