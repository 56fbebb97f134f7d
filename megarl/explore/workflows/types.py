"""Interface of workflows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from megarl.core.schema import Task
from megarl.explore.recording.model import RolloutModel

Workflow = Callable[[Task, RolloutModel], Awaitable[None]]
"""``await workflow(task, model)`` makes one trajectory. The explorer runs as many concurrently as capacity allows,
passes the model's last turn to the verifier, and restarts interrupted workflows."""
