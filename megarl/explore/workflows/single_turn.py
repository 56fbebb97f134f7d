"""One response to a prompt."""

from __future__ import annotations

from megarl.core.schema import Task
from megarl.explore.recording.model import RolloutModel


async def single_turn(task: Task, model: RolloutModel) -> None:
    """Ask the task, and take the model's response as its answer."""
    model.ask(task)
    await model.generate()
