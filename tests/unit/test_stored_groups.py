"""Groups of a step against the store: lags, and the order of tasks."""

from __future__ import annotations

from collections import Counter

import pytest

from megarl.buffer.order.draws import tasks_of_step
from megarl.core.schema import Reward, Trajectory
from megarl.train.parts.stored_groups import lags_of, tasks_in_order, tokens_of_versions, wrong_lags
from tests.trajectories import VERSION, one_turn


def answered(index: int, score: float, *, length: int = 2, token: int = 5, verifier: str = "math") -> Trajectory:
    turns = one_turn([1], [token] * length)
    reward = Reward(score, "ok" if score >= 1 else "wrong")
    about = {"reward": {"verifier": verifier}}
    return Trajectory("train-000000", "train/0", "g", index, 4, turns, reward, metadata=about)


@pytest.mark.parametrize("start", [0, 5, 12])
def test_the_order_of_tasks_is_that_of_the_steps(start: int) -> None:
    ids = [f"train/{i}" for i in range(7)]
    assert tasks_in_order(ids, 3 * start, 3, 11) == tasks_of_step(ids, start, 3, 11)


def test_lags_are_those_of_the_versions_in_the_store() -> None:
    tokens = lags_of(tokens_of_versions([answered(0, 1.0)]), {str(VERSION): 3}, 4)
    assert tokens == Counter({(str(VERSION), 1): 2})
    assert wrong_lags(tokens, {str(VERSION): 1}, 1) == {}
    assert set(wrong_lags(tokens, {}, 1)) == {"lag"}
    assert set(wrong_lags(tokens, {str(VERSION): 1}, 0)) == {"stale"}
