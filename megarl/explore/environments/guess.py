"""A number to be guessed; the environment answers that it is greater or less."""

from __future__ import annotations

import re

from megarl.core.schema import Task
from megarl.explore.environments.types import Observation

NUMBER = re.compile(r"-?\d+")
LONGEST = 18
"""Characters of a number; Python refuses to read some thousands of digits."""


class Guess:
    """One episode: the ground truth is the number. A guess that is right is worth 1; ``extra_info['tries']`` ends it.

    Args:
        task: ``ground_truth``: the number; ``extra_info['tries']``: most guesses, by default 4.
    """

    def __init__(self, task: Task) -> None:
        self._number = int(task.ground_truth)
        self._left = int(task.extra_info.get("tries", 4))

    def step(self, response: str) -> Observation:
        """Compare the last number of a response; one that is too long is none."""
        found = NUMBER.findall(response)
        guess = int(found[-1]) if found and len(found[-1]) <= LONGEST else None
        self._left -= 1
        if guess == self._number:
            return Observation("", 1.0, done=True, success=True)
        if guess is None or not self._left:
            return Observation("", done=True, success=False)
        return Observation("higher" if guess < self._number else "lower")

    def close(self) -> None:
        """Nothing is held."""
