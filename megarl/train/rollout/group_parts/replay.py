"""Groups of earlier steps that a step trains on again (``buffer.replay``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megarl.buffer.experience import Verified, by_group
from megarl.buffer.order.draws import data_seed
from megarl.buffer.order.group_choice import ReplayChoice, replay_metrics
from megarl.config import Config
from megarl.core.schema import Trajectory
from megarl.train.ranks import Stopped, TrainState
from megarl.train.rollout.group_part import FoundGroups, GroupPart
from megarl.train.rollout.reading import RolloutReader


class ReplayedGroups(GroupPart):
    """Adds these groups to a step's new groups."""

    mixes_versions = True

    def __init__(
        self,
        config: Config,
        reader: RolloutReader,
        replay: ReplayChoice,
        verified: Callable[[Sequence[Trajectory], int], Verified],
    ) -> None:
        self._seed, self._reader, self._replay, self._verified = config.trainer.seed, reader, replay, verified

    def begin(self, found: FoundGroups, state: TrainState) -> None:
        """Read the groups and verify them again: verification includes length rewards, which depend on the step."""
        seed = data_seed(self._seed, state.rollbacks)
        read = self._reader.replayed(lambda: self._replay.groups(state.step, seed, state.step))
        if read is None:
            raise Stopped
        found.replayed = [replayed for replayed, _ in read]
        trajectories = [trajectory for _, group in read for trajectory in group]
        verified = self._verified(trajectories, state.step)
        found.count(trajectories, verified)
        found.again, found.again_dropped = by_group(verified.trajectories), verified.dropped
        # counted in the step that sampled them
        found.report += replace(verified.report, groups=0, dropped={}, ends={}, excluded={})

    def metrics(self, found: FoundGroups, new: int) -> dict[str, float]:
        return replay_metrics(found.replayed, len(found.replayed) + new)
