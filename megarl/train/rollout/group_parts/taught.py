"""Groups whose trajectories have the scores of their teachers at URLs; others are dropped, never trained with zeros."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.buffer.experience.pipeline import lacks_reward
from megarl.config import Config
from megarl.config.algorithms import teacher_top_k
from megarl.config.derived import teacher_of
from megarl.core.schema import Trajectory
from megarl.train.rollout.group_part import GroupPart
from megarl.train.rollout.reading import RolloutReader


class TaughtGroups(GroupPart):
    """Checks the scores that the explorer has stored: the settings may have changed since."""

    def __init__(self, config: Config, reader: RolloutReader) -> None:
        self._teachers, self._reward, self._reader = config.teachers, config.reward, reader
        self._top_k = teacher_top_k(config.algorithm)
        self._urls = {name for name, teacher in config.teachers.items() if teacher.url is not None}

    def lacks(self, group: Sequence[Trajectory]) -> str | None:
        others = {each.teacher_scores.teacher for each in group if each.teacher_scores is not None} - self._urls
        if others:
            return f"its teacher {min(others)} is no longer one with a url"
        if counts := {each.teacher_scores.top_k for each in group if each.teacher_scores is not None} - {self._top_k}:
            return f"it has the {min(counts)} likeliest tokens of its teacher, not {self._top_k} (algorithm.top_k)"
        unscored = [each for each in group if each.teacher_scores is None and not lacks_reward(each, self._reward)]
        asked = {name for name in self._urls if self._teachers[name].weight}
        sources = self._reader.data_sources(unscored) if unscored and asked else {}
        names = asked & {teacher_of(self._teachers, source) for source in sources.values()}
        return f"teachers.{min(names)} has not scored all its members" if names else None
