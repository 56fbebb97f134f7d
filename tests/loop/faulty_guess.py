"""The environment ``guess``, of whose episodes every fifth fails the first time it is played, in one of 20 ways."""

from __future__ import annotations

import itertools
from typing import Any

from megarl.core.schema import Task
from megarl.explore.environments import Observation
from megarl.explore.environments.guess import Guess
from tests.loop.fault_kinds import EXCEPTIONS

KINDS = (
    *EXCEPTIONS,
    None,  # a step that returns nothing
    0.0,  # a step that returns a reward alone
    "text",  # an observation whose text is none
    "reward",  # an observation whose reward is not finite
    "close",  # an episode that fails, and cannot be closed either
)
WORDS = {
    None: "got None",
    0.0: "got 0.0",
    "text": "Observation.text",
    "reward": "Observation.reward",
    "close": "SystemExit",
}
"""In the log, of those that are no exceptions."""
made = itertools.count()
failed = list[Any]()


class Faulty(Guess):
    """Episode that fails at its first step, or when it is made."""

    def __init__(self, task: Task, kind: Any) -> None:
        failed.append(kind)
        if isinstance(kind, BaseException) and len(failed) // len(KINDS) % 2:
            raise kind
        super().__init__(task)
        self.kind = kind

    def step(self, response: str) -> Observation:
        if isinstance(self.kind, BaseException):
            raise self.kind
        if self.kind == "text":
            return Observation(None)  # type: ignore[arg-type]
        if self.kind == "reward":
            return Observation("", float("nan"))
        if self.kind == "close":
            raise OSError("lost")
        return self.kind  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.kind == "close":
            raise SystemExit(1)


def make(task: Task) -> Guess:
    """Begin an episode. One that failed begins again soon, and is then most likely no fifth one."""
    number = next(made)
    return Faulty(task, KINDS[len(failed) % len(KINDS)]) if number % 5 == 0 else Guess(task)
