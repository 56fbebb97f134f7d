"""An environment that shows a picture with each message: the task's question is asked again of its picture upside down,
and then of the picture itself. An agent that does the same is ``picture_agent.py``."""

from __future__ import annotations

from typing import Any

from megarl.core.schema import Task
from megarl.explore.environments import Observation
from tests.loop.picture_agent import turned


class Game:
    def __init__(self, task: Task) -> None:
        (self.image,), self.truth = task.images, str(task.ground_truth)
        self.left = [Observation("And now?<image>", images=[self.image]), Observation("", images=[turned(self.image)])]

    def step(self, response: str) -> Observation:
        reward = float(response.strip() == self.truth)
        if not self.left:
            return Observation("", reward, done=True)
        seen = self.left.pop()
        return Observation(seen.text, reward, images=seen.images)

    def close(self) -> None:
        pass


def make(task: Task) -> Any:
    return Game(task)
