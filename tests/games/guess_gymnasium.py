"""The game ``guess`` as an environment of gymnasium, ``tests.games.guess_gymnasium:Guess-v0``; nothing of megarl."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
from gymnasium.spaces import Text

TEXT = Text(max_length=10_000, min_length=0)


class Guess(gymnasium.Env[str, str]):
    """A number to be guessed; ``reset`` takes it as ``ground_truth``, and the most guesses as ``tries``."""

    action_space = TEXT
    observation_space = TEXT

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert options is not None
        self.number, self.left = int(options["ground_truth"]), int(options.get("tries", 4))
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        found = re.findall(r"-?\d+", action)
        guess = int(found[-1]) if found else None
        self.left -= 1
        if guess == self.number:
            return "", 1.0, True, False, {}
        if guess is None or not self.left:
            return "", 0.0, guess is None, not self.left, {}
        return ("higher" if guess < self.number else "lower"), 0.0, False, False, {}


gymnasium.register("Guess-v0", Guess, disable_env_checker=True)
