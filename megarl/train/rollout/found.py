"""Groups that a step has found so far, and the account of all that was sampled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.buffer.experience import Report, Verified, by_group
from megarl.buffer.order.replay import Replayed
from megarl.buffer.store import Used
from megarl.core.schema import Trajectory
from megarl.train.batch.accounts import NONE, Amount, Excluded, SampleAccount, sum_of

SURPLUS = "surplus"
"""Reason to drop a group that a step has found beyond ``trainer.tasks_per_step``."""


@dataclass
class FoundGroups:
    """Groups of a step so far."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    raw: list[Trajectory] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report(0, {}, {}, ()))
    measured: list[dict[str, float]] = field(default_factory=list)
    """Metrics under ``rollout/``, which are added up."""
    replayed: list[Replayed] = field(default_factory=list)
    again: list[list[Trajectory]] = field(default_factory=list)
    """Groups of earlier steps, by ``replayed``."""
    again_dropped: dict[str, str] = field(default_factory=dict)
    members: dict[str, dict[int, Amount]] = field(default_factory=dict)
    """Group id -> index of a member -> what was sampled for it, of every group that was read."""
    excluded: dict[tuple[str, int], str] = field(default_factory=dict)
    """(group id, index) of members that kept groups are trained without -> reason."""
    greedy: Amount = NONE
    """Greedy answers of these groups."""

    def count(self, trajectories: Sequence[Trajectory], verified: Verified) -> None:
        """Count what was sampled for whole groups, as they were read, and who of them is left out."""
        for group in by_group(trajectories):
            self.members[group[0].group_id] = {e.index: Amount(1, e.response_length) for e in group}
            if (greedy := group[0].greedy) is not None:
                self.greedy += Amount(1, greedy.response_length)
        self.excluded |= verified.excluded

    def account(self, wanted: int) -> SampleAccount:
        """Account for all that was sampled: why some of it is not trained."""
        excluded = Excluded()
        excluded.add("greedy", self.greedy)
        dropped = {**self.used(wanted).dropped, **self.again_dropped}
        for group_id, reason in dropped.items():
            excluded.add(reason, sum_of(self.members[group_id].values()))
        for (group_id, index), reason in self.excluded.items():
            if group_id not in dropped:
                excluded.add(reason, self.members[group_id][index])
        sampled = sum_of(amount for group in self.members.values() for amount in group.values())
        return SampleAccount(sampled + self.greedy, excluded)

    def ids(self) -> set[str]:
        """Ids of the groups that were asked for, taken so far."""
        return {trajectory.group_id for trajectory in self.raw}

    def used(self, wanted: int) -> Used:
        """Return what becomes of all groups when the step trains on ``wanted`` new ones."""
        ids = [group[0].group_id for group in self.groups]
        dropped = self.dropped | dict.fromkeys(ids[wanted:], SURPLUS)
        again = tuple(group.group_id for group in self.replayed)
        trained = {*ids[:wanted], *again}
        excluded = {member: reason for member, reason in self.excluded.items() if member[0] in trained}
        return Used(tuple(ids[:wanted]), dropped, again, excluded)

    def trained(self, wanted: int) -> list[Trajectory]:
        """Trajectories of the step: replayed groups are spread evenly among those that were sampled for it, so that
        each of its updates has some."""
        kinds = (self.groups[:wanted], self.again)
        placed = [((2 * i + 1) / len(groups), group) for groups in kinds for i, group in enumerate(groups)]
        return [trajectory for _, group in sorted(placed, key=lambda place: place[0]) for trajectory in group]
