"""The form of a workflow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np

from megarl.core.schema import Author, End, Reward, Task, Turn


class RolloutModel(Protocol):
    """The rollout model in one trajectory. It records the turns itself, so a workflow returns nothing."""

    def ask(self, task: Task) -> Turn:
        """Add the task's prompt, rendered by the chat template, with its images."""
        ...

    def add(self, author: Author, text: str) -> Turn | None:
        """Add a message after the model's turn, rendered by the chat template up to where the model goes on.

        None, adding nothing, where it leaves no room for a token of the model. Raises DataError where the template has
        no place for such a message.
        """
        ...

    def write(self, author: Author, token_ids: np.ndarray) -> Turn:
        """Add a turn of another author, int32 [T], with all that the chat template puts around it."""
        ...

    @property
    def room(self) -> int:
        """Tokens that the trajectory may still get (``rollout.max_trajectory_tokens``)."""
        ...

    async def generate(self) -> Turn:
        """Sample the model's next turn from all turns so far, and add it. Raises EngineError, RequestRefused."""
        ...

    def text(self, turn: Turn) -> str:
        """Text of a model's turn without special tokens."""
        ...

    def finish(self, reward: Reward) -> None:
        """Give the trajectory this reward; the verifier is not asked."""
        ...

    def fail(self, reason: str, cause: End = End.WORKFLOW_ERROR) -> None:
        """Give the trajectory no verdict: the status is ``error``. It begins again ``rollout.retries`` times."""
        ...

    async def verify(self) -> Reward:
        """Reward of the model's last turn, as the trajectory would get it."""
        ...


Workflow = Callable[[Task, RolloutModel], Awaitable[None]]
"""``await workflow(task, model)`` makes one trajectory. The explorer runs as many at once as there is room for, gives
the last turn of the model to the verifier, and starts a workflow that was interrupted from its beginning."""
