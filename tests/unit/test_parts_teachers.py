"""The part of a step that asks teachers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.schema import Config, TeacherConfig
from megarl.core.schema import TEACHER, Reward, Trajectory
from megarl.train.parts.teachers import Teachers
from megarl.train.ranks import TrainState
from tests.trajectories import one_turn


@pytest.mark.parametrize(("step", "name"), [(7, "a"), (8, None)])
def test_a_teacher_whose_weight_has_fallen_to_zero_gets_no_forward_pass(step: int, name: str | None) -> None:
    reader: Any = SimpleNamespace(data_sources=lambda some: dict.fromkeys((each.task_id for each in some), "x"))
    trajectory = Trajectory("train", "t", "g", 0, 1, one_turn([1], [4, 5]), Reward(0.0, "ok"))
    data: Any = SimpleNamespace(trajectories=[trajectory])
    teachers = {"a": TeacherConfig(path="/t", decay_steps=8)}
    Teachers(Config(teachers=teachers), reader).before_batch(TrainState("rl", step=step), data)
    assert data.trajectories[0].metadata[TEACHER] == name
