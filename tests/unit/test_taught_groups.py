"""Groups that lack the scores of their teacher at a URL."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.config import compose
from megarl.config.algorithms import DistillConfig
from megarl.config.schema import TeacherConfig
from megarl.core.schema import End, Reward, TeacherScores, Trajectory
from megarl.train.rollout.group_parts.taught import TaughtGroups
from tests.trajectories import one_turn


def trajectory() -> Trajectory:
    return Trajectory("train-000000", "t", "g", 0, 1, one_turn([1, 2, 3], [4, 5]), Reward(1.0, "ok"))


def test_groups_without_scores_are_dropped() -> None:
    """As after a change of the settings: a group was sampled when another teacher, or none, taught its source."""
    teachers = {"large": TeacherConfig(url="http://x/v1", sources=["a"]), "near": TeacherConfig("/m", sources=["b"])}
    base = compose(["experiment=quickstart"])
    config: Any = SimpleNamespace(teachers=teachers, reward=base.reward, algorithm=base.algorithm)
    source = "a"
    reader: Any = SimpleNamespace(data_sources=lambda some: {each.task_id: source for each in some})
    part, scores = (
        TaughtGroups(config, reader),
        TeacherScores("large", *(np.zeros(s, np.float32) for s in (2, (2, 0), (2, 0)))),
    )
    scored = replace(trajectory(), teacher_scores=scores)
    assert part.lacks([scored]) is None
    assert part.lacks([scored, trajectory()]) == "teachers.large has not scored all its members"
    teachers["large"] = replace(teachers["large"], weight=0.0)
    assert TaughtGroups(config, reader).lacks([trajectory()]) is None, "its teacher is not asked"
    teachers["large"] = replace(teachers["large"], weight=1.0)
    failed = replace(trajectory(), reward=Reward(math.nan, "error"), cause=End.TEACHER_ERROR)
    assert part.lacks([scored, failed]) is None
    other = replace(trajectory(), teacher_scores=replace(scores, teacher="gone"))
    assert part.lacks([other]) == "its teacher gone is no longer one with a url"
    config.algorithm = DistillConfig(name="distill", divergence="jsd", top_k=4)
    assert TaughtGroups(config, reader).lacks([scored]) == (
        "it has the 0 likeliest tokens of its teacher, not 4 (algorithm.top_k)"
    )
    source = "b"
    assert part.lacks([trajectory()]) is None
