"""The form of an environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

from megarl.core.schema import End, Task


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a response."""

    text: str
    """Next message to the model; not read where ``done``."""
    reward: float = 0.0
    """Reward of the response. A trajectory's score is the sum over its responses."""
    done: bool = False
    """The episode has ended."""
    success: bool | None = None
    """Outcome of an episode that has ended; None: whether its score is 1.0 or more."""
    images: Sequence[bytes] = ()
    """Files of the images that the text's ``<image>`` stand for; they come before a text without one."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Observation.text must be a text, got {self.text!r:.60}")
        if isinstance(self.images, bytes) or not all(isinstance(image, bytes) for image in self.images):
            raise TypeError(f"Observation.images must be files of images, each in bytes, got {self.images!r:.60}")
        if not isinstance(self.reward, SupportsFloat) or not math.isfinite(self.reward):
            raise ValueError(f"Observation.reward must be a finite number, got {self.reward!r:.60}")
        for name, value in (("done", self.done), ("success", self.success)):
            if value not in (0, 1) and (name, value) != ("success", None):  # a text is true whatever it says
                raise ValueError(f"Observation.{name} must be True or False, got {value!r:.60}")


PARAMETERS = ("seed", "group_seed", "limits", "count_tokens", "options")
"""Parameters that ``make`` may have: the trajectory's seed, for all that is random in the episode, the same when it
begins again; that of its group, for what its trajectories have in common; lengths (``recording.limits.TokenLimits``); a
function that counts the tokens of a text; ``rollout.options``."""


class EnvironmentFault(Exception):
    """An environment has raised an exception."""

    cause = End.ENVIRONMENT_ERROR


class EnvironmentTimeout(EnvironmentFault):
    """A call of an environment has not returned within its limit."""

    cause = End.ENVIRONMENT_TIMEOUT


class Environment(Protocol):
    """One episode of a task. Its methods are called in threads, one after another, and may block for
    ``rollout.environment_timeout_s``."""

    # def reset(self) -> str | Observation: the first one, where an environment has one beside the task's prompt
    # def end(self) -> float: further reward of an episode that a limit of the trajectory has ended
    # def kill(self) -> None: end a call past its limit, which then raises; close follows

    def step(self, response: str, /, *args: Any, **kwargs: Any) -> Observation:
        """Take a response of the model, without special tokens, and its score where ``make`` asks for one. It begins
        with the thought: act on ``core.thoughts.without_thought(response)``. An exception ends the episode without a
        verdict."""
        ...

    def close(self) -> None:
        """Free what the episode holds; called once, however it ends, when no other call of it runs."""
        ...


class MakeEnvironment(Protocol):
    """``make(task)`` begins an episode; further parameters are given by their names (``PARAMETERS``). The task's prompt
    is its first observation, with what ``reset()`` returns where there is such a method. Where ``make.asks_verifier``
    is true, ``step`` gets the score of each response too, by the task's verifier in the pool of rewards."""

    def __call__(self, task: Task, *args: Any, **kwargs: Any) -> Environment: ...
