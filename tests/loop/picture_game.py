"""An environment that shows a picture with each message: the task's question is asked again of its picture upside down,
and then of the picture itself. Its verifier scores each response. An agent that does the same is ``picture_agent.py``.
"""

from __future__ import annotations

from megarl.core.schema import Task
from megarl.explore.environments import Observation
from tests.loop.picture_agent import turned


class Game:
    """Episode of three responses."""

    asks_verifier = True

    def __init__(self, task: Task) -> None:
        (self.image,) = task.images
        self.left = [Observation("And now?<image>", images=[self.image]), Observation("", images=[turned(self.image)])]

    def step(self, response: str, score: float) -> Observation:
        if not self.left:
            return Observation("", score, done=True)
        seen = self.left.pop()
        return Observation(seen.text, score, images=seen.images)

    def close(self) -> None:
        pass


make = Game
