"""Workflows: the course of a trajectory, from a task to its last turn.

A workflow is imported only if a job uses it, because agents and tools import servers and sandboxes.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.imports import import_file
from megarl.explore import environments
from megarl.tasks import ChatTokenizer

if TYPE_CHECKING:
    from megarl.explore.recording.model import Workflow

WORKFLOWS = ("single_turn", "reflect", "best_of_n")
"""Names of ``rollout.workflow``, each a function in ``single_turn.py``."""

__all__ = ["WORKFLOWS", "asks_verifier", "check", "check_template", "get", "opened"]


def asks_verifier(rollout: RolloutConfig) -> bool:
    """Return False if rewards come from the environment or agent, so that rows need no verifier."""
    if rollout.workflow == "environment":
        return environments.asks_verifier(environments.get(rollout.environment))
    return not (rollout.workflow == "agent" and rollout.agent_rewards)


@asynccontextmanager
async def opened(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> AsyncIterator[Workflow]:
    """Yield the workflow of ``rollout.workflow``, with its servers running. Raises ConfigError if it does not exist."""
    if rollout.workflow == "agent":
        from megarl.explore.workflows.agent import serving_agents

        async with serving_agents(rollout, tokenizer) as workflow:
            yield workflow
    elif rollout.workflow == "tools":
        from megarl.explore.workflows.tools import serving_tools

        with serving_tools(rollout, tokenizer) as workflow:
            yield workflow
    else:
        yield get(rollout)


def check(rollout: RolloutConfig, run_dir: Path) -> None:
    """Raise ConfigError unless the workflow exists, its sandbox hides the run's directory, and its first observations
    have room."""
    if rollout.tools and rollout.workflow != "tools":
        raise ConfigError(
            f"rollout.tools={rollout.tools} does nothing with rollout.workflow={rollout.workflow}; set "
            "rollout.workflow=tools, or leave rollout.tools out"
        )
    if rollout.workflow == "agent":
        from megarl.explore.agents import program

        program.check(rollout, run_dir)
        return
    if rollout.workflow == "tools":
        from megarl.explore.workflows.tools import check_tools

        check_tools(rollout)
        return
    if rollout.workflow == "environment":
        environments.check(rollout, run_dir)
    elif rollout.workflow == "best_of_n":
        from megarl.explore.workflows.single_turn import check_options

        check_options(rollout.options)
    elif rollout.workflow not in WORKFLOWS:
        get(rollout)


def check_template(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError unless the model's chat template fits the workflow."""
    if rollout.workflow == "tools":
        from megarl.explore.workflows.tools import check_format

        check_format(rollout, tokenizer)


def get(rollout: RolloutConfig) -> Workflow:
    """Return a workflow that needs no server: one of ``WORKFLOWS``, ``environment``, or ``workflow`` of a user's file.

    Raises ConfigError if it does not exist.
    """
    name = rollout.workflow
    if name == "environment":
        from megarl.explore.environments.types import EpisodeThreads
        from megarl.explore.workflows.environment import environment

        threads = EpisodeThreads(rollout.environment_threads, rollout.environment_timeout_s)
        return environment(environments.get(rollout.environment), threads)
    if name in WORKFLOWS:
        own: Workflow = getattr(import_module(f"{__name__}.single_turn"), name)
        return own
    if not name.endswith(".py"):
        raise ConfigError(
            f"rollout.workflow={name!r} does not exist; choose one of {', '.join(WORKFLOWS)}, tools, environment, "
            "agent, or give a Python file (.py)"
        )
    wanted = "async def workflow(task, model)"
    found = getattr(import_file(name, "rollout.workflow", wanted), "workflow", None)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"rollout.workflow={name} has no {wanted}")
    workflow: Workflow = found
    return workflow
