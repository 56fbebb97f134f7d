"""A greedy response to each task, in addition to the samples; its reward is their baseline (ReMax, 2310.10505)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.core.schema import Trajectory
from megarl.train.rollout.group_part import GroupPart


class GreedyBaseline(GroupPart):
    """Requests the greedy responses."""

    def sampling(self) -> Mapping[str, Any]:
        return {"greedy": True}

    def lacks(self, group: Sequence[Trajectory]) -> str | None:
        return "its greedy answer is missing" if any(each.greedy is None for each in group) else None
