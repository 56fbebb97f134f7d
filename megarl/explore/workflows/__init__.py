"""Workflows: what happens in a trajectory, from a task to its last turn."""

import inspect

from megarl.core.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.user_file import import_file
from megarl.explore import environments
from megarl.explore.workflows.environment import environment
from megarl.explore.workflows.reflect import reflect
from megarl.explore.workflows.single_turn import single_turn
from megarl.explore.workflows.types import RolloutModel, Workflow

WORKFLOWS: dict[str, Workflow] = {"single_turn": single_turn, "reflect": reflect}
"""By the names of ``rollout.workflow``."""

__all__ = ["WORKFLOWS", "RolloutModel", "Workflow", "asks_verifier", "get"]


def asks_verifier(rollout: RolloutConfig) -> bool:
    """Return False where rewards come from the environment, so that rows need no verifier."""
    return rollout.workflow != "environment"


def get(rollout: RolloutConfig) -> Workflow:
    """Workflow of ``rollout.workflow``: one of ``WORKFLOWS``, ``environment`` with that of ``rollout.environment``, or
    the function ``workflow`` of a user's file.

    Raises ConfigError where there is none.
    """
    name = rollout.workflow
    if name == "environment":
        return environment(environments.get(rollout.environment))
    if name in WORKFLOWS:
        return WORKFLOWS[name]
    if not name.endswith(".py"):
        raise ConfigError(
            f"rollout.workflow={name!r} is not there; there are {', '.join(WORKFLOWS)}, environment, or give "
            "a Python file (.py)"
        )
    wanted = "async def workflow(task, model)"
    found = getattr(import_file(name, "rollout.workflow", wanted), "workflow", None)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"rollout.workflow={name} has no {wanted}")
    workflow: Workflow = found
    return workflow
