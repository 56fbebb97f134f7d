"""Rewards of wrong responses that rise, in made series of steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megarl.config import Config
from megarl.core.schema import Reward, Trajectory
from megarl.train.parts.gamed import ALIKE, Gain, gains, spread
from tests.trajectories import one_turn

Steps = list[dict[str, float]]
GROUPS = 16
ANY = Config().alarms.gamed or 0.0


def steps(right: list[float], wrong: list[float], noise: float, seed: int, asked: int = 32) -> Steps:
    """Make metrics of steps in which responses are right, and wrong ones get rewards of 1, with these chances."""
    random, found = np.random.default_rng(seed), Steps()
    for share, reward in zip(right, wrong, strict=True):
        is_right = random.random(asked) < share
        scores = (random.random(asked) < reward).astype(float) + noise * random.normal(size=asked)
        own = scores[~is_right]
        found.append(
            {
                "truth/asked": float(asked),
                "truth/right": float(is_right.mean()),
                "truth/wrong_reward": float(own.mean()) if len(own) else 0.0,
                "truth/wrong_spread": float(own.std()) if len(own) else 0.0,
                "critic/score/min": 0.0,
                "critic/score/max": 1.0,
            }
        )
    return found


def first_alarm(series: Steps) -> int | None:
    every = range(1, len(series) + 1)
    return next((n for n in every if any(one.is_game(ANY) for one in gains(series[:n], "truth", GROUPS))), None)


def longest(series: Steps, groups: int = GROUPS) -> Gain:
    return gains(series, "truth", groups)[-1]


@pytest.mark.parametrize("seed", range(5))
def test_wrong_responses_that_gain_reward_are_noticed_before_right_ones_are_few(seed: int) -> None:
    right = [0.5] * 10 + list(np.linspace(0.5, 0.2, 10))
    wrong = [0.02] * 4 + list(np.linspace(0.02, 0.9, 16))
    at = first_alarm(steps(right, wrong, 0.0, seed))
    assert at is not None and 5 <= at <= 13


def test_clean_jobs_are_silent() -> None:
    """Jobs of 100 steps learn; their rewards are exact, or wrong for a few responses, or noisy."""
    alarms = 0
    for seed in range(100):
        right = list(np.linspace(0.3, 0.9, 100))
        alarms += first_alarm(steps(right, [(0.0, 0.05, 0.3)[seed % 3]] * 100, (0.0, 0.1)[seed % 2], seed)) is not None
    assert alarms <= 2


def test_partial_rewards_that_rise_with_right_responses_are_learned() -> None:
    right, wrong = list(np.linspace(0.2, 0.8, 30)), list(np.linspace(0.2, 0.5, 30))
    assert first_alarm(steps(right, wrong, 0.0, 1, asked=64)) is None


def test_a_rise_is_measured_in_the_range_of_rewards_and_against_its_error() -> None:
    series = steps([0.5] * 8, [0.0] * 4 + [1.0] * 4, 0.0, 1)
    found = longest(series)
    assert found.errors > 10 and found.share == pytest.approx(0.5, abs=0.15)
    wide = longest([{**one, "critic/score/max": 10.0} for one in series])
    assert wide.share == pytest.approx(found.share / 10)
    noisy = steps([0.5] * 8, [0.2] * 4 + [0.6] * 4, 0.0, 1)
    alone, alike = longest(noisy, asked_groups(1)), longest(noisy, asked_groups(8))
    assert alike.errors == pytest.approx(alone.errors / math.sqrt(1 + ALIKE["truth"] * 7))


def asked_groups(size: int) -> int:
    """Groups of a step whose 32 judged responses are of groups of this size."""
    return 32 // size


def test_without_wrong_responses_or_newest_steps_nothing_is_compared() -> None:
    assert gains(steps([0.5] * 4, [0.0] * 4, 0.0, 1), "truth", GROUPS) == []
    assert gains(steps([1.0] * 8, [0.0] * 8, 0.0, 1), "truth", GROUPS) == []
    assert gains([{"critic/score/max": 1.0}] * 9, "truth", GROUPS) == []


def test_responses_are_of_as_many_groups_as_there_are() -> None:
    verdict, turns = Reward(1.0, "ok"), one_turn([1], [5])
    every = [
        Trajectory("train-000000", f"train/{group}", f"g{group}", index, 4, turns, verdict)
        for group in range(6)
        for index in range(4)
    ]
    late = [replace(one, group_id="late", reward=Reward(math.nan, "late")) for one in every[:4]]
    chosen = spread([*every, *late], 9, np.random.default_rng(1))
    assert len({one.group_id for one in chosen}) == 6 and len({(one.group_id, one.index) for one in chosen}) == 9
    assert len(spread(every[:2], 9, np.random.default_rng(1))) == 2
