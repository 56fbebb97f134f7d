"""Questions of reasoning-gym (Apache-2.0) with several tries: ``rollout.environment=reasoning_gym``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.core.schema import Task
from megarl.explore.environments.types import Observation, checked, refuse

OPTIONS = {"tries": int, "feedback": str}
FAMILY = "reasoning_gym/"
TRIES = 3
FEEDBACK = "That is not right. Try again."


class ReasoningGym:
    """One question: a response whose score is below 1 gets feedback and another try.

    A response's reward is the gain over the best earlier score, so the trajectory's reward is its best score. Scores
    come from the reward pool.

    Args:
        task: A row of ``reasoning_gym/<family>``, as ``megarl data`` writes it.
        options: ``tries``: most responses, by default 3; ``feedback``: text after a wrong response.
    """

    asks_verifier = True

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        if not task.data_source.startswith(FAMILY):
            raise ValueError(f"data_source {task.data_source!r}: give rows of {FAMILY}<family>")
        self._left = options.get("tries", TRIES)
        self._feedback = options.get("feedback", FEEDBACK)
        self._best = 0.0

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError for invalid options."""
        checked("reasoning_gym", options, OPTIONS)
        if options.get("tries", TRIES) < 1:
            refuse("tries", options["tries"], "must be at least 1")

    def step(self, response: str, score: float) -> Observation:
        """Ask again unless the score is 1."""
        gained = max(score - self._best, 0.0)
        self._best += gained
        self._left -= 1
        right = score >= 1.0
        return Observation(self._feedback, gained, done=right or not self._left, success=right)

    def close(self) -> None:
        """Do nothing: the episode holds no resources."""
