"""Episodes that an environment ends, and equal ones in which it goes on."""

from __future__ import annotations

import numpy as np

from megarl.core.schema import Reward, Trajectory, Turn
from megarl.train.parts.equal_episodes import broken_episodes
from tests.trajectories import one_turn


def episode(index: int, *answers: int, score: float = 0.0) -> Trajectory:
    """The model writes 5 before each answer of the environment, and at the end."""
    prompt, response = one_turn([1], [5])
    turns = [prompt]
    for answer in answers:
        turns += [response, Turn("environment", np.array([answer], np.int32))]
    reward = Reward(score, "ok" if score else "wrong")
    return Trajectory("train-000000", "train/0", "g", index, 4, (*turns, response), reward)


def test_an_episode_that_ends_where_an_equal_one_goes_on_is_found() -> None:
    whole = [episode(0, 7, 8), episode(1, 7, 8)]
    assert broken_episodes(whole) == []
    assert [one.index for one in broken_episodes([*whole, episode(2, 7)])] == [2]
    assert broken_episodes([*whole, episode(2, 7), episode(3, 6)]) == [], "the environment has chance in it"
    assert broken_episodes([*whole, episode(2, 7, score=1.0)]) == []
