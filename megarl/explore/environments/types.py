"""The form of an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megarl.core.schema import Task


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


class EnvironmentFault(Exception):
    """An environment has raised an exception."""


class Environment(Protocol):
    """One episode of a task. Its methods are called in a thread, one after another, and may block."""

    def step(self, response: str) -> Observation:
        """Take a response of the model, without special tokens. An exception ends the episode without a verdict."""
        ...

    def close(self) -> None:
        """Free what the episode holds; called once, however it ends."""
        ...


class MakeEnvironment(Protocol):
    """``make(task)``: begins an episode. The task's prompt is its first observation."""

    def __call__(self, task: Task) -> Environment: ...
