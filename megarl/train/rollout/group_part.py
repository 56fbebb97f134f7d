"""A part of the group service: what one feature adds to the asking for groups and to the choice among them."""

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
from megarl.train.rollout.awaited import Awaited
from megarl.train.rollout.found import FoundGroups
from megarl.train.rollout.reading import RolloutReader


@dataclass(frozen=True)
class GroupServices:
    """Services of ``Rollouts``. A part's constructor names those that it uses."""

    config: Config
    store: Store
    reader: RolloutReader
    replay: ReplayChoice
    verified: Callable[[Sequence[Trajectory], int], Verified]
    """``Rollouts.verified``."""


class GroupPart:
    """Hooks, which do nothing by default. Every rank calls every hook, in the order of ``group_parts.GROUP_PARTS``."""

    rounds = 1
    """Most rollouts that a step asks for, one after the other, until it has enough groups."""
    mixes_versions = False
    """True where a step trains on tokens of several versions, whatever ``sync.max_staleness`` is."""

    def sampling(self) -> Mapping[str, Any]:
        """Return settings of the sampler for each group, beside temperature, length and seed."""
        return {}

    def look_ahead(self, ahead: int, step: int) -> Awaited | None:
        """Return the progress of groups that were asked for ahead, for step ``ahead``, where less than all of them must
        be there before weights change in step ``step``; None: all."""
        return None

    def overdue(self, unused: Callable[[], Sequence[UnusedGroup]], step: int) -> list[UnusedGroup]:
        """Return groups that step ``step`` takes without rewards that they await; ``unused`` reads those that no step
        has used."""
        return []

    def begin(self, found: FoundGroups, state: TrainState) -> None:
        """Act when the first groups of a step are there, and none has been taken. Raises Stopped."""

    def lacks(self, group: Sequence[Trajectory]) -> str | None:
        """Say what a group lacks to be whole; None: nothing."""
        return None

    def select(self, found: FoundGroups, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """Return the verified groups that the step keeps; add the others to ``found.dropped``."""
        return groups

    def finish(self, found: FoundGroups, state: TrainState, rounds: int) -> None:
        """Act after the last of ``rounds`` rollouts of a step. Raises NonRetryableError."""

    def metrics(self, found: FoundGroups, new: int) -> dict[str, float]:
        """Return metrics of a step; ``new``: number of its groups that are trained for the first time."""
        return {}

    def change(self, trajectories: list[Trajectory], state: TrainState) -> list[Trajectory]:
        """Return the trajectories that are trained in place of these."""
        return trajectories


P = TypeVar("P")


def made(part: type[P], services: object) -> P:
    """Make a part with the services that its constructor names."""
    return part(**{name: getattr(services, name) for name in signature(part).parameters})
