"""Groups found for a step so far, and the hooks of parts that change how groups are requested and chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from megarl.buffer.experience import Report, Verified, by_group
from megarl.buffer.order.group_choice import ReplayChoice, Replayed
from megarl.buffer.store import Store, UnusedGroup, Used
from megarl.config import Config
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.train.batch.samples import NONE, Amount, Excluded, SampleAccount, sum_of
from megarl.train.ranks import TrainState
from megarl.train.rollout.reading import RolloutReader


class Published(NamedTuple):
    """Weights published last."""

    version: WeightsVersion
    step: int
    """Number of training steps in these weights."""


class Awaited(NamedTuple):
    """Progress of a wait."""

    done: int
    total: int
    complete: bool


def whole(store: Store, rollout: str, *, awaiting: bool = False) -> Awaited:
    """Return a rollout's progress in groups; ``awaiting``: count groups that lack only late rewards as done."""
    done, total = store.rollouts.progress(rollout, awaiting=awaiting)
    return Awaited(done, total, done == total and store.rollouts.is_complete(rollout, awaiting=awaiting))


def rollout_id(step: int, extra: int = 0) -> str:
    """Return the id of a training rollout."""
    return f"train-{step:06d}" + (f"-{extra}" if extra else "")


def rollout_of(group_id: str) -> str:
    """Return the rollout id of a group."""
    return group_id.rpartition("/")[0]


SURPLUS = "surplus"
"""Reason to drop a group beyond ``trainer.tasks_per_step``."""


@dataclass
class FoundGroups:
    """Groups of a step so far."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    raw: list[Trajectory] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report(0, {}, {}, ()))
    measured: list[dict[str, float]] = field(default_factory=list)
    """Metrics under ``rollout/``, to be summed."""
    replayed: list[Replayed] = field(default_factory=list)
    again: list[list[Trajectory]] = field(default_factory=list)
    """Groups of earlier steps, in the order of ``replayed``."""
    again_dropped: dict[str, str] = field(default_factory=dict)
    members: dict[str, dict[int, Amount]] = field(default_factory=dict)
    """Group id -> index of a member -> amount sampled for the member, for every group read."""
    excluded: dict[tuple[str, int], str] = field(default_factory=dict)
    """(group id, index) of members excluded from kept groups -> reason."""
    greedy: Amount = NONE
    """Amount of greedy responses of these groups."""

    def count(self, trajectories: Sequence[Trajectory], verified: Verified) -> None:
        """Count the samples of whole groups as read, and their excluded members."""
        for group in by_group(trajectories):
            self.members[group[0].group_id] = {e.index: Amount(1, e.response_length) for e in group}
            if (greedy := group[0].greedy) is not None:
                self.greedy += Amount(1, greedy.response_length)
        self.excluded |= verified.excluded

    def account(self, wanted: int) -> SampleAccount:
        """Return an account of all samples, with the reasons for not training on some."""
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
        """Return the ids of the requested groups taken so far."""
        return {trajectory.group_id for trajectory in self.raw}

    def used(self, wanted: int) -> Used:
        """Return the use of all groups in a step that trains on ``wanted`` new ones."""
        ids = [group[0].group_id for group in self.groups]
        dropped = self.dropped | dict.fromkeys(ids[wanted:], SURPLUS)
        again = tuple(group.group_id for group in self.replayed)
        trained = {*ids[:wanted], *again}
        excluded = {member: reason for member, reason in self.excluded.items() if member[0] in trained}
        return Used(tuple(ids[:wanted]), dropped, again, excluded)

    def trained(self, wanted: int) -> list[Trajectory]:
        """Return the step's trajectories. Replayed groups are spread evenly among new ones, so that each update has
        some."""
        kinds = (self.groups[:wanted], self.again)
        placed = [((2 * i + 1) / len(groups), group) for groups in kinds for i, group in enumerate(groups)]
        return [trajectory for _, group in sorted(placed, key=lambda place: place[0]) for trajectory in group]


@dataclass(frozen=True)
class GroupServices:
    """Services of ``Rollouts``. A part's constructor names the services that it uses."""

    config: Config
    store: Store
    reader: RolloutReader
    replay: ReplayChoice
    verified: Callable[[Sequence[Trajectory], int], Verified]
    """``Rollouts.verified``."""


class GroupPart:
    """Hooks; the defaults do nothing. Every rank calls every hook, in the order of ``group_parts.GROUP_PARTS``."""

    rounds = 1
    """Maximum number of rollouts that a step requests, one after the other, until it has enough groups."""
    mixes_versions = False
    """True if a step trains on tokens of several versions regardless of ``sync.max_staleness``."""

    def sampling(self) -> Mapping[str, Any]:
        """Return sampler settings of each group, in addition to temperature, length and seed."""
        return {}

    def look_ahead(self, ahead: int, step: int) -> Awaited | None:
        """Return the progress of groups requested for step ``ahead``, if fewer than all must be complete before weights
        change in step ``step``; None: all must be."""
        return None

    def overdue(self, unused: Callable[[], Sequence[UnusedGroup]], step: int) -> list[UnusedGroup]:
        """Return the groups that step ``step`` takes although rewards are missing. ``unused`` reads the groups that no
        step has used."""
        return []

    def begin(self, found: FoundGroups, state: TrainState) -> None:
        """Run when a step's first groups are ready, before any is taken. Raises Stopped."""

    def lacks(self, group: Sequence[Trajectory]) -> str | None:
        """Return what a group lacks to be complete; None if nothing is missing."""
        return None

    def select(self, found: FoundGroups, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """Return the verified groups that the step keeps; add the others to ``found.dropped``."""
        return groups

    def finish(self, found: FoundGroups, state: TrainState, rounds: int) -> None:
        """Run after the last of a step's ``rounds`` rollouts. Raises NonRetryableError."""

    def metrics(self, found: FoundGroups, new: int) -> dict[str, float]:
        """Return metrics of a step; ``new``: number of its groups that are trained for the first time."""
        return {}

    def change(self, trajectories: list[Trajectory], state: TrainState) -> list[Trajectory]:
        """Return the trajectories to train on instead of ``trajectories``."""
        return trajectories


P = TypeVar("P")


def made(part: type[P], services: object) -> P:
    """Make a part with the services that its constructor names."""
    return part(**{name: getattr(services, name) for name in signature(part).parameters})
