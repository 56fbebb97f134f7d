"""Groups whose greedy answer is missing, where it is the baseline of their rewards."""

from __future__ import annotations

from dataclasses import replace

from megarl.train.rollout.group_parts.greedy import GreedyBaseline
from tests.unit.test_reward_pipeline import group, with_greedy


def test_a_group_lacks_its_greedy_answer() -> None:
    first, second = with_greedy(group("a", 1.0, 0.0))
    assert GreedyBaseline().lacks([first, second]) is None
    assert GreedyBaseline().lacks([first, replace(second, greedy=None)]) == "its greedy answer is missing"
