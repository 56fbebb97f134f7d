"""Rewards that are independent of the responses, as a control experiment (``reward.shuffle``)."""

from __future__ import annotations

from megarl.buffer.experience import shuffle_rewards
from megarl.buffer.order.draws import data_seed
from megarl.config import Config
from megarl.core.schema import Trajectory
from megarl.train.ranks import TrainState
from megarl.train.rollout.group_part import GroupPart


class ShuffledRewards(GroupPart):
    """Permutes the rewards of a step."""

    def __init__(self, config: Config) -> None:
        self._seed = config.trainer.seed

    def change(self, trajectories: list[Trajectory], state: TrainState) -> list[Trajectory]:
        return shuffle_rewards(trajectories, seed=data_seed(self._seed, state.rollbacks) * 1_000_003 + state.step)
