"""A greedy answer to each task beside the sampled ones, whose reward is their baseline (ReMax, 2310.10505)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.core.schema import Trajectory
from megarl.train.rollout.group_part import GroupPart


class GreedyBaseline(GroupPart):
    """Asks for the greedy answers."""

    def sampling(self) -> Mapping[str, Any]:
        return {"greedy": True}

    def lacks(self, group: Sequence[Trajectory]) -> str | None:
        return "its greedy answer is missing" if any(each.greedy is None for each in group) else None
