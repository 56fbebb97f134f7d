"""Rewards that arrive up to a number of steps late (``reward.late_steps``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.buffer.store import UnusedGroup
from megarl.config import Config
from megarl.train.rollout.group_part import GroupPart


class OverdueRewards(GroupPart):
    """Lets a step take groups whose rewards are still missing after ``reward.late_steps`` steps."""

    def __init__(self, config: Config) -> None:
        assert config.reward.late_steps is not None, "the settings ask for this part"
        self._limit = config.reward.late_steps

    def overdue(self, unused: Callable[[], Sequence[UnusedGroup]], step: int) -> list[UnusedGroup]:
        return [group for group in unused() if group.awaiting and step - group.weights_step >= self._limit]
