"""A second response after a wrong one."""

from __future__ import annotations

from megarl.core.schema import Task
from megarl.explore.recording.model import RolloutModel

FEEDBACK = "That is wrong. Try again."


async def reflect(task: Task, model: RolloutModel) -> None:
    """Ask the task; after a response that is not right, say so and take a second one as the answer.

    One response is all where it is right, has no verdict, was truncated, or leaves no room for another.
    """
    model.ask(task)
    first = await model.generate()
    if first.finish_reason != "stop" or (await model.verify()).status != "wrong":
        return
    if model.add("user", FEEDBACK) is not None:
        await model.generate()
