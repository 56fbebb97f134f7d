"""What the stored answers of an evaluation say about its report."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.core.schema import Reward, Task, Trajectory, WeightsVersion
from megarl.train.rollout.evaluation_check import StoredAnswers
from tests.trajectories import one_turn

FIRST, SECOND = WeightsVersion(0, 1), WeightsVersion(0, 2)
TASKS = ["a", "b"]
RIGHT = {"a": [True, False, False, False], "b": [True, True, False, True]}


def answers(right: dict[str, list[bool]], version: WeightsVersion = FIRST) -> StoredAnswers:
    found = StoredAnswers()
    for task, each in right.items():
        turns = one_turn([1, 2], [3], version=version)
        rewards = [Reward(float(ok), "ok" if ok else "wrong") for ok in each]
        found.add([Trajectory("e", task, task, i, 4, turns, reward) for i, reward in enumerate(rewards)])
    return found


def test_each_held_out_row_is_answered_once() -> None:
    assert answers(RIGHT).rows(TASKS, 4) is None
    assert "other" in str(answers({**RIGHT, "other": RIGHT["a"]}).rows(TASKS, 4))
    assert "b" in str(answers({"a": RIGHT["a"]}).rows(TASKS, 4))
    assert "b" in str(answers({**RIGHT, "b": RIGHT["b"] * 2}).rows(TASKS, 4))


def test_reported_numbers_are_those_of_the_answers() -> None:
    # Of 6 pairs of answers, 3 have a right one of a, and all have one of b.
    good = {"val/accuracy": 0.5, "val/score": 0.5, "val/pass@2": 0.75, "val/pass@4": 1.0}
    assert answers(RIGHT).numbers(good, TASKS, 4) is None
    for name, value in good.items():
        assert name in str(answers(RIGHT).numbers({**good, name: value - 0.01}, TASKS, 4))
    assert answers(RIGHT).numbers({**good, "val/accuracy": float("nan")}, TASKS, 4)


@pytest.mark.parametrize(("steps", "silent"), [({FIRST: 3}, True), ({FIRST: 2}, False), ({}, False)])
def test_tokens_have_the_evaluated_weights(steps: dict[WeightsVersion, int], silent: bool) -> None:
    assert (answers(RIGHT).weights(steps, 3) is None) is silent


def test_two_versions_of_one_step_are_two() -> None:
    found = answers(RIGHT)
    found.versions.add(SECOND)
    assert "0.2" in str(found.weights({FIRST: 3, SECOND: 3}, 3))


def test_prompts_are_those_of_the_template() -> None:
    tasks = {name: Task(name, "s", (), "", {}) for name in TASKS}
    assert answers(RIGHT).templates(lambda task: np.array([1, 2]), tasks) is None
    assert "a" in str(answers(RIGHT).templates(lambda task: np.array([1, 1, 2]), tasks))
