"""Part of the group service: hooks for one feature to change how groups are requested and chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

from megarl.buffer.experience import Verified
from megarl.buffer.order.replay import ReplayChoice
from megarl.buffer.store import Store, UnusedGroup
from megarl.config import Config
from megarl.core.schema import Trajectory
from megarl.train.rank.state import TrainState
from megarl.train.rollout.found import Awaited, FoundGroups
from megarl.train.rollout.reading import RolloutReader


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
