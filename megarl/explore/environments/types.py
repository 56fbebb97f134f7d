"""Interface of environments; checks of their ``rollout.options`` and numbers in responses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, SupportsFloat

from megarl.core.errors import ConfigError
from megarl.core.schema import End, Task

NUMBER = re.compile(r"-?\d+")
LONGEST = 18
"""Most characters of a number, so that it fits int64; Python refuses to parse thousands of digits."""


def last_number(response: str) -> int | None:
    """Return the last whole number of a response; None without one or if it is too long."""
    found = NUMBER.findall(response)
    return int(found[-1]) if found and len(found[-1]) <= LONGEST else None


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    """Raise ConfigError for an option."""
    raise ConfigError(f"rollout.options.{name}={value!r} {rule}")


def checked(
    environment: str, options: Mapping[str, Any], known: Mapping[str, Any], needed: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigError for an unknown option, a wrong type, or a missing required option.

    Args:
        known: Name -> its type, or a union of types.
        needed: Name of each required option -> an example.
    """
    for name, value in options.items():
        if name not in known:
            refuse(name, value, f"is no option of rollout.environment={environment}, which has {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            kind = getattr(known[name], "__name__", str(known[name]))
            refuse(name, value, f"must be a {kind} for rollout.environment={environment}")
    for name, example in (needed or {}).items():
        if not options.get(name):
            raise ConfigError(
                f"rollout.options.{name} is not set, which rollout.environment={environment} needs; set it to such as "
                f"{example}"
            )


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a response."""

    text: str
    """Next message to the model; ignored if ``done``."""
    reward: float = 0.0
    """Reward of the response. A trajectory's score is the sum over its responses."""
    done: bool = False
    """True if the episode has ended."""
    success: bool | None = None
    """Outcome of an ended episode; None: success if its score is 1.0 or more."""
    images: Sequence[bytes] = ()
    """Files of the images for the text's ``<image>`` placeholders; without placeholders they precede the text."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Observation.text must be a text, got {self.text!r:.60}")
        if isinstance(self.images, bytes) or not all(isinstance(image, bytes) for image in self.images):
            raise TypeError(f"Observation.images must be files of images, each in bytes, got {self.images!r:.60}")
        if not isinstance(self.reward, SupportsFloat) or not math.isfinite(self.reward):
            raise ValueError(f"Observation.reward must be a finite number, got {self.reward!r:.60}")
        for name, value in (("done", self.done), ("success", self.success)):
            if value not in (0, 1) and (name, value) != ("success", None):  # any text is truthy
                raise ValueError(f"Observation.{name} must be True or False, got {value!r:.60}")


PARAMETERS = ("seed", "group_seed", "limits", "count_tokens", "options")
"""Parameters that ``make`` may take: the trajectory's seed for all randomness of the episode, unchanged by retries; the
group's seed for randomness shared by its trajectories; lengths (``recording.limits.TokenLimits``); a function that
counts the tokens of a text; ``rollout.options``."""


class EnvironmentFault(Exception):
    """An environment has raised an exception."""

    cause = End.ENVIRONMENT_ERROR


class EnvironmentTimeout(EnvironmentFault):
    """A call of an environment timed out."""

    cause = End.ENVIRONMENT_TIMEOUT


class Environment(Protocol):
    """One episode of a task. Its methods are called in threads, one after another, and may block for
    ``rollout.environment_timeout_s``."""

    # def reset(self) -> str | Observation: optional first observation after the task's prompt def end(self) -> float:
    # optional further reward after a limit of the trajectory def kill(self) -> None: optional; make a timed-out call
    # raise, before close

    def step(self, response: str, /, *args: Any, **kwargs: Any) -> Observation:
        """Take a response of the model, without special tokens, and its score if ``make.asks_verifier``. A thinking
        model's response begins with the thought: act on ``core.thoughts.without_thought(response)``. An exception ends
        the episode without a verdict."""
        ...

    def close(self) -> None:
        """Free the episode's resources; called once after any end, while no other call runs."""
        ...


class MakeEnvironment(Protocol):
    """``make(task)`` begins an episode; further parameters are passed by name (``PARAMETERS``). The first observation
    is the task's prompt, followed by the result of ``reset()`` if defined. If ``make.asks_verifier`` is true, ``step``
    also gets each response's score from the task's verifier."""

    def __call__(self, task: Task, *args: Any, **kwargs: Any) -> Environment: ...
