"""Replacement of groups that are all right or all wrong (``algorithm.dynamic_sampling``; DAPO, 2503.14476)."""

from __future__ import annotations

from collections import Counter

from megarl.buffer.experience import split_by_accuracy
from megarl.config import Config
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Trajectory
from megarl.train.ranks import TrainState
from megarl.train.rollout.group_part import FoundGroups, GroupPart

KINDS = ("all_right", "all_wrong")


class DynamicSampling(GroupPart):
    """Drops these groups; until it has enough, the step requests at most ``algorithm.max_extra_rollouts`` further
    rollouts of other tasks."""

    def __init__(self, config: Config) -> None:
        self.rounds = 1 + config.algorithm.max_extra_rollouts

    def select(self, found: FoundGroups, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        kept, left_out = split_by_accuracy(groups)
        found.dropped |= left_out
        counts = Counter(left_out.values())
        found.measured.append({kind: float(counts[kind]) for kind in KINDS})
        return kept

    def finish(self, found: FoundGroups, state: TrainState, rounds: int) -> None:
        if found.groups or found.again or not found.report.kept:
            return
        right, wrong = (sum(m.get(kind, 0.0) for m in found.measured) for kind in KINDS)
        raise NonRetryableError(
            f"algorithm.dynamic_sampling=true: none of the {found.report.kept} groups of {rounds} rollouts of "
            f"step {state.step + 1} is between all right ({right:.0f}) and all wrong ({wrong:.0f}); raise "
            "algorithm.max_extra_rollouts or algorithm.group_size, take other tasks, or set it to false"
        )
