"""Workflows: what happens in a trajectory, from a task to its last turn."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from megarl.core.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.user_file import import_file
from megarl.explore import environments
from megarl.explore.agents import runner
from megarl.explore.environments import EpisodeThreads
from megarl.explore.recording.model import RolloutModel
from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.workflows.agent import serving_agents
from megarl.explore.workflows.best_of_n import best_of_n, check_options
from megarl.explore.workflows.environment import environment
from megarl.explore.workflows.reflect import reflect
from megarl.explore.workflows.single_turn import single_turn
from megarl.explore.workflows.tools import check_format, check_tools, serving_tools
from megarl.explore.workflows.types import Workflow

WORKFLOWS: dict[str, Workflow] = {"single_turn": single_turn, "reflect": reflect, "best_of_n": best_of_n}
"""By the names of ``rollout.workflow``."""

__all__ = ["WORKFLOWS", "RolloutModel", "Workflow", "asks_verifier", "check", "check_template", "opened"]


def asks_verifier(rollout: RolloutConfig) -> bool:
    """Return False where rewards come from the environment or the agent, so that rows need no verifier."""
    if rollout.workflow == "environment":
        return environments.asks_verifier(environments.get(rollout.environment))
    return not (rollout.workflow == "agent" and rollout.agent_rewards)


@asynccontextmanager
async def opened(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> AsyncIterator[Workflow]:
    """Workflow of ``rollout.workflow``, with what it serves meanwhile. Raises ConfigError where there is none."""
    if rollout.workflow == "agent":
        async with serving_agents(rollout, tokenizer) as workflow:
            yield workflow
    elif rollout.workflow == "tools":
        with serving_tools(rollout, tokenizer) as workflow:
            yield workflow
    else:
        yield get(rollout)


def check(rollout: RolloutConfig, run_dir: Path) -> None:
    """Raise ConfigError unless there is such a workflow, one whose sandbox hides the run's directory, and whose first
    observations have room."""
    if rollout.workflow == "agent":
        runner.check(rollout, run_dir)
        return
    if rollout.workflow == "tools":
        check_tools(rollout)
        return
    get(rollout)
    if rollout.workflow == "best_of_n":
        check_options(rollout.options)
    if rollout.workflow == "environment":
        environments.check(rollout, run_dir)


def check_template(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError unless the model's chat template fits the workflow."""
    if rollout.workflow == "tools":
        check_format(rollout, tokenizer)


def get(rollout: RolloutConfig) -> Workflow:
    """Workflow that needs nothing served: one of ``WORKFLOWS``, ``environment``, or ``workflow`` of a user's file.

    Raises ConfigError where there is none.
    """
    name = rollout.workflow
    if name == "environment":
        threads = EpisodeThreads(rollout.environment_threads, rollout.environment_timeout_s)
        return environment(environments.get(rollout.environment), threads)
    if name in WORKFLOWS:
        return WORKFLOWS[name]
    if not name.endswith(".py"):
        raise ConfigError(
            f"rollout.workflow={name!r} is not there; there are {', '.join(WORKFLOWS)}, tools, environment, agent, or "
            "give a Python file (.py)"
        )
    wanted = "async def workflow(task, model)"
    found = getattr(import_file(name, "rollout.workflow", wanted), "workflow", None)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"rollout.workflow={name} has no {wanted}")
    workflow: Workflow = found
    return workflow
