"""Verdicts that are asked for again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.config import Config
from megarl.config.rewards import LanguageConfig, RewardConfig
from megarl.core.schema import Reward, Trajectory
from megarl.rewards.again import BareVerifiers
from megarl.train.parts.verdicts import choice, differences, shape_again, wrong_parts
from tests.trajectories import one_turn


def answered(index: int, score: float, *, length: int = 2, token: int = 5, verifier: str = "math") -> Trajectory:
    turns = one_turn([1], [token] * length)
    reward = Reward(score, "ok" if score >= 1 else "wrong")
    about = {"reward": {"verifier": verifier}}
    return Trajectory("train-000000", "train/0", "g", index, 4, turns, reward, metadata=about)


def test_a_verdict_that_is_another_when_it_is_asked_for_again_is_named() -> None:
    config, again = Config(), {"score": 1.0, "status": "ok"}
    assert differences(Reward(1.0, "ok"), again, {}, config) == []
    assert [name for name, _ in differences(Reward(0.0, "wrong"), again, {}, config)] == ["verdicts"]
    assert [name for name, _ in differences(Reward(-1.0, "ok"), again, {}, config)] == ["verdicts"]


def test_parts_and_weights_are_taken_off_before_scores_are_compared() -> None:
    reward = RewardConfig(weight=2.0, language=LanguageConfig(weight=0.5, language="en"))
    config = replace(Config(), reward=reward)
    shape = shape_again("two words", "", False, reward)
    assert shape == {"language": 1.0}
    trained = Reward(2.0 + 0.5 - 0.25, "ok", {"language": 1.0, "overlong": -0.25, "answer": 1.0})
    again = {"score": 1.0, "status": "ok"}
    assert differences(trained, again, shape, config) == []
    assert [name for name, _ in differences(replace(trained, score=1.0), again, shape, config)] == ["verdicts"]
    without = Reward(2.0, "ok", {"language": 0.0, "answer": 1.0})
    assert [name for name, _ in differences(without, again, shape, config)] == ["shaping"]


def test_responses_with_unequal_verdicts_and_high_scores_are_asked_first() -> None:
    random = np.random.default_rng(0)
    same = [answered(0, 1.0), answered(1, 0.0)]
    others = [answered(i, 0.0, token=10 + i) for i in range(2, 9)]
    assert {one.index for one in choice([*same, *others], 2, random)} == {0, 1}
    high = [answered(9, 1.0, token=40)]
    assert 9 in {one.index for one in choice([*others, *high], 2, random)}
    assert choice([answered(0, 1.0, verifier="judge")], 2, random) == []


def test_the_penalty_of_long_responses_is_computed_again() -> None:
    config = RewardConfig(overlong_buffer=4)
    right, zero = answered(0, 0.5, length=6), answered(1, 0.0)
    right = replace(right, reward=Reward(0.5, "ok", {"overlong": -0.5}))
    zero = replace(zero, reward=Reward(0.0, "wrong", {"overlong": 0.0}))
    assert wrong_parts([right, zero], config, 8, 0) == []
    assert len(wrong_parts([right, answered(1, 0.0)], config, 8, 0)) == 1


def test_the_second_verifier_returns_the_verdict_without_weights(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    own = BareVerifiers(RewardConfig(path=str(path), weight=3.0))
    assert own.score("x", "4", "4", {}, "", False) == {"score": 1.0, "status": "ok", "parts": {}}
    assert BareVerifiers(RewardConfig()).score("math", r"\boxed{4}", "4", {}, "2 + 2", False)["status"] == "ok"
