"""Advantages of turns from their own rewards, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.buffer.experience import with_group_stats
from megarl.config.algorithms import AlgorithmConfig, settings_of
from megarl.config.schema import Config
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward, Trajectory, Turn
from megarl.learn import algorithms
from megarl.run.checks.settings import check_algorithm
from megarl.train.batch.batch import StepBatch, make_batch
from megarl.train.ranks import TrainState
from tests.trajectories import one_turn
from tests.unit.test_learner import learner_of


def trajectory(index: int, score: float, *rewards: float | None, group: str = "g") -> Trajectory:
    """A prompt, then responses of two tokens and messages of one in turn."""
    turns: list[Turn] = []
    for number, reward in enumerate(rewards):
        before, response = one_turn([1] if number else [1, 2, 3], [5, 6])
        turns.append(replace(before, author="environment" if number else "user", follows=len(turns) - 1))
        turns.append(replace(response, follows=len(turns) - 1, reward=reward))
    return Trajectory("r", "t", group, index, 2, tuple(turns), Reward(score, "ok"))


def estimated(trajectories: list[Trajectory], **changes: Any) -> tuple[StepBatch, list[float]]:
    """Batch of a step, and the advantages of its trained tokens."""
    settings = AlgorithmConfig(**changes)
    found = make_batch(with_group_stats(trajectories), [], algorithms.get(settings.name), settings, 1)
    learner_of(Config(algorithm=settings)).estimate(TrainState(), found)
    assert found.sequences.advantages is not None
    assert not found.sequences.advantages[~found.sequences.mask].any()
    return found, found.sequences.advantages[found.sequences.mask].tolist()


def each_twice(*values: float) -> Any:
    return pytest.approx([value for value in values for _ in range(2)], abs=1e-5)


GROUP = [trajectory(0, 1.0, 1.0, 0.0, 2.0), trajectory(1, 0.0, 0.0, 4.0)]


def test_by_hand() -> None:
    """Returns with γ = 0.5: 1.5, 1, 2 and 2, 4. The third turn has no other to be compared with."""
    _, found = estimated(GROUP, turn_rewards=0.25, turn_gamma=0.5, normalize_by_std=False)
    a, b = 0.5, -0.5
    turns = [1.5 - 1.75, 1.0 - 2.5, 0.0, 2.0 - 1.75, 4.0 - 2.5]
    assert found == each_twice(*(0.75 * own + 0.25 * turn for own, turn in zip([a, a, a, b, b], turns, strict=True)))


@pytest.mark.parametrize(("name", "factor"), [("grpo", 2**-0.5), ("rloo", 1.0)])
def test_turns_are_compared_as_trajectories_are(name: str, factor: float) -> None:
    """Of two values GRPO's advantages are ±1/√2, RLOO's the difference."""
    _, found = estimated(GROUP, name=name, turn_rewards=1.0, turn_gamma=0.0)
    differences = [1.0, -4.0, 0.0, -1.0, 4.0]
    assert found == each_twice(*(np.sign(d) * factor if name == "grpo" else d for d in differences))


def test_groups_are_apart_and_equal_turns_get_nothing() -> None:
    other = [trajectory(i, 1.0, 0.3, None, group="h") for i in range(2)]
    _, alone = estimated(GROUP, turn_rewards=0.5)
    _, both = estimated([*GROUP, *other], turn_rewards=0.5)
    assert both == [*alone, *[0.0] * 8]


def test_a_share_of_none_is_as_if_there_were_no_rewards_of_turns() -> None:
    without = [replace(t, turns=tuple(replace(turn, reward=None) for turn in t.turns)) for t in GROUP]
    batch, found = estimated(GROUP)
    assert batch.turn_advantages is None and found == estimated(without)[1]


def test_lines_that_share_a_turn_train_it_once() -> None:
    """A second line from the first response: its return is along the line that trains it."""
    first = trajectory(0, 1.0, 1.0, 3.0)
    message, response = one_turn([7, 7], [8, 8, 8])
    more = (replace(message, author="environment", follows=1), replace(response, follows=4, reward=-1.0))
    branched = replace(first, turns=(*first.turns, *more))
    other = trajectory(1, 0.0, 0.0, 0.0)
    batch, found = estimated([branched, other], turn_rewards=1.0, normalize_by_std=False)
    assert batch.sequences.trajectory is not None
    seconds = [3.0, -1.0, 0.0]
    mean = sum(seconds) / 3
    assert found == pytest.approx([2.0, 2.0, 3 - mean, 3 - mean, *[-1 - mean] * 3, -2.0, -2.0, -mean, -mean], abs=1e-5)


def test_algorithms_without_are_refused() -> None:
    for name in ("opmd", "remax", "reinforce_pp_baseline"):
        config = Config(algorithm=settings_of(name)(name=name, turn_rewards=0.5))
        with pytest.raises(ConfigError, match=r"algorithm\.turn_rewards=0\.5 with .*take one of grpo, rloo, gspo"):
            check_algorithm(config)
    check_algorithm(Config(algorithm=AlgorithmConfig(name="grpo", turn_rewards=0.5)))
