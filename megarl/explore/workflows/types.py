"""The form of a workflow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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

    def begin(self, token_ids: np.ndarray, *, in_thinking: bool = False) -> Turn:
        """Add a rendered prompt, int32 [T], that follows no turn: a context that was rewritten, or a sub-agent's.

        ``in_thinking``: it ends inside a thought.
        """
        ...

    def write(self, author: Author, token_ids: np.ndarray, *, after: int = -1, in_thinking: bool = False) -> Turn:
        """Add a turn of another author, int32 [T], with all that the chat template puts around it.

        ``after``: index of the turn that it follows, -1 for the last one.
        """
        ...

    @property
    def index(self) -> int:
        """Index of the trajectory in its group; ``GREEDY`` for the greedy one."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the trajectory, for what is random in it beside its samples.

        It is the same when the trajectory begins again, and in a job that was resumed.
        """
        ...

    @property
    def has_response(self) -> bool:
        """True if the model has written a turn."""
        ...

    @property
    def room(self) -> int:
        """Tokens that the trajectory may still get (``rollout.max_trajectory_tokens``)."""
        ...

    @property
    def limit(self) -> int:
        """Most tokens of a line of turns."""
        ...

    def room_after(self, turn: int) -> int:
        """Tokens that may still follow a turn, by its index."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns so far."""
        ...

    async def generate(self, *, after: int = -1, max_tokens: int | None = None) -> Turn:
        """Sample a turn of the model from the turns up to ``after`` (-1: the last one), and add it.

        ``max_tokens``: where fewer than ``rollout.max_response_tokens``. Raises EngineError, PromptRefused.
        """
        ...

    def text(self, turn: Turn) -> str:
        """Text of a model's turn without special tokens."""
        ...

    def finish(self, reward: Reward) -> None:
        """Give the trajectory this reward; the verifier is not asked."""
        ...

    def truncate(self) -> None:
        """End the trajectory for want of room; the reward is that of its last response."""
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
