"""A second response after a wrong one."""

from __future__ import annotations

from megarl.core.schema import Task
from megarl.explore.recording.model import RolloutModel

FEEDBACK = "That is wrong. Try again."


async def reflect(task: Task, model: RolloutModel) -> None:
    """Ask the task; after a wrong response, tell the model and take a second response as the answer.

    The first response is final if it is right, has no verdict, was truncated, or leaves no room.
    """
    model.ask(task)
    first = await model.generate()
    if first.finish_reason != "stop" or (await model.verify()).status != "wrong":
        return
    if model.add("user", FEEDBACK) is not None:
        await model.generate()
