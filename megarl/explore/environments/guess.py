"""A guessing game for a number; the environment replies greater or less."""

from __future__ import annotations

from megarl.core.schema import Task
from megarl.core.text import without_thought
from megarl.explore.environments.types import Observation, last_number


class Guess:
    """One episode. A right guess has reward 1; ``extra_info['tries']`` limits the guesses.

    Args:
        task: ``ground_truth``: the number; ``extra_info['tries']``: most guesses, by default 4.
    """

    def __init__(self, task: Task) -> None:
        self._number = int(task.ground_truth)
        self._left = int(task.extra_info.get("tries", 4))

    def step(self, response: str) -> Observation:
        """Compare the last number of a response; too long numbers are ignored."""
        guess = last_number(without_thought(response))
        self._left -= 1
        if guess == self._number:
            return Observation("", 1.0, done=True, success=True)
        if guess is None or not self._left:
            return Observation("", done=True, success=False)
        return Observation("higher" if guess < self._number else "lower")

    def close(self) -> None:
        """Do nothing: the episode holds no resources."""
