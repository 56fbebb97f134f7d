"""One run of a workflow: its own time, its exceptions, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.core.errors import EngineError, JobError, PromptRefused, describe
from megarl.core.schema import End, Task
from megarl.explore.recording.model import RolloutModel
from megarl.explore.recording.recorded_values import NoRoom
from megarl.explore.workflows.types import Workflow

CANCEL_S = 5.0
"""Grace period in seconds of a cancelled workflow to free its resources."""
SHORTEST_WAIT_S = 0.05
"""Shortest time between two checks of a workflow's own time."""


class OwnTime:
    """A workflow's own time in seconds, without waits for the engine and the verifier."""

    def __init__(self) -> None:
        self._waits = 0
        self._spent_s = 0.0
        self._since = time.monotonic()
        self.ended = False

    @property
    def running(self) -> bool:
        """True while the workflow does its own work."""
        return not self._waits and not self.ended

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._spent_s + (time.monotonic() - self._since if self.running else 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the body's time from the workflow's own time. Raises RuntimeError after the workflow's end."""
        if self.ended:
            raise RuntimeError("the trajectory has ended")
        self._spent_s = self.seconds
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._since = time.monotonic()


async def run_workflow(
    workflow: Workflow, task: Task, model: RolloutModel, own: OwnTime, timeout_s: float | None
) -> None:
    """Run a workflow; if it raises or times out, its trajectory gets no verdict.

    Args:
        timeout_s: Most seconds of its own work; None for workflows with their own limit.

    Raises EngineError and JobError, for which the workflow is not responsible.
    """
    try:
        await _run(workflow, task, model, own, timeout_s)
    finally:
        model.end.close()


async def _run(workflow: Workflow, task: Task, model: RolloutModel, own: OwnTime, timeout_s: float | None) -> None:
    work = asyncio.create_task(_contained(workflow, task, model))
    try:
        while not work.done() and (timeout_s is None or own.seconds < timeout_s):
            left_s = None if timeout_s is None else max(timeout_s - own.seconds, SHORTEST_WAIT_S)
            await asyncio.wait({work}, timeout=left_s)
    finally:
        in_time = work.done()
        if not in_time:
            work.cancel()
            await asyncio.wait({work}, timeout=CANCEL_S)
        own.ended = True
    if in_time and work.cancelled():
        model.fail("the workflow has cancelled its own task")
    elif in_time:
        _settle(model, work.result())
    else:
        model.fail(
            f"the workflow has not ended within rollout.workflow_timeout_s={timeout_s:g} of its own time, in which it "
            "waits neither for the engine nor for the verifier",
            End.WORKFLOW_TIMEOUT,
        )


def _settle(model: RolloutModel, error: BaseException | None) -> None:
    if isinstance(error, EngineError | JobError) and not isinstance(error, PromptRefused):
        raise error
    if isinstance(error, NoRoom):
        model.truncate()
    elif error is not None:
        model.fail(describe(error))
    record, cause = model.record, model.end.cause
    if record.unread and (cause is None or cause.by_policy):
        # the earliest cause of a short trajectory counts
        model.fail(f"the workflow has not waited for {record.unread} of its responses", End.ABANDONED)
    elif not record.has_response and cause is None:
        model.fail("the workflow ended without a response of the model")


async def _contained(workflow: Workflow, task: Task, model: RolloutModel) -> BaseException | None:
    """Run a workflow and return its exception: a raised SystemExit would end the event loop, a CancelledError would
    look like a cancellation."""
    try:
        await workflow(task, model)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return error
    except BaseException as error:
        return error
    return None
