"""The form of a workflow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from megarl.core.schema import Task
from megarl.explore.recording.model import RolloutModel

Workflow = Callable[[Task, RolloutModel], Awaitable[None]]
"""``await workflow(task, model)`` makes one trajectory. The explorer runs as many at once as there is room for, gives
the last turn of the model to the verifier, and starts a workflow that was interrupted from its beginning."""
