"""The form of a workflow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np

from megarl.core.schema import Author, Task, Turn


class RolloutModel(Protocol):
    """The rollout model in one trajectory. It records the turns itself, so a workflow returns nothing."""

    def ask(self, task: Task) -> Turn:
        """Add the task's prompt, rendered by the chat template, with its images."""
        ...

    def write(self, author: Author, token_ids: np.ndarray) -> Turn:
        """Add a turn of another author, int32 [T], with all that the chat template puts around it."""
        ...

    async def generate(self) -> Turn:
        """Sample the model's next turn from all turns so far, and add it. Raises EngineError, RequestRefused."""
        ...


Workflow = Callable[[Task, RolloutModel], Awaitable[None]]
"""``await workflow(task, model)`` makes one trajectory. The explorer runs as many at once as there is room for, gives
the last turn of the model to the verifier, and starts a workflow that was interrupted from its beginning."""
