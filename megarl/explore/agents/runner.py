"""Agents that megarl starts: a function in a user's file, or a command line for each trajectory."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import shlex
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError, describe
from megarl.core.imports import import_file
from megarl.core.schema import Task
from megarl.explore.agents.program import CommandSandbox, command_environment, run_command, with_loopback
from megarl.explore.agents.request import prompt_of

log = logging.getLogger(__name__)

Run = Callable[[str, Task, dict[str, Any], dict[str, Any]], Awaitable[Any]]
"""``await run(base_url, task, request_kwargs, metadata)``: the agent's result, or None to ask the verifier."""


class AgentFault(Exception):
    """An agent raised a BaseException such as SystemExit."""


def load(rollout: RolloutConfig, endpoint: Path | None = None) -> Run:
    """Load the agent of ``rollout.agent``: ``run`` of a Python file, or a command. Raises ConfigError.

    Args:
        endpoint: UNIX socket of the endpoint for commands in a sandbox.
    """
    agent = rollout.agent
    if not agent:
        raise ConfigError(
            "rollout.workflow=agent needs rollout.agent: a Python file (.py) with `async def run(base_url, prompt, "
            "request_kwargs, metadata)`, or a command line"
        )
    words = shlex.split(agent)
    if len(words) > 1 or not agent.endswith(".py"):
        return _command(words, rollout, endpoint)
    if rollout.agent_sandbox:
        raise ConfigError(
            f"rollout.agent_sandbox=true, but {agent} runs in the explorer's process; give a command line, such as "
            f"'python {agent}', or leave it out"
        )
    os.environ.update(with_loopback(os.environ))  # before the file creates its client
    wanted = "async def run(base_url, prompt, request_kwargs, metadata)"
    module = import_file(agent, "rollout.agent", wanted)
    atexit.register(vars(module).clear)  # its clients close themselves with modules that are gone later
    function = getattr(module, "run", None)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.agent={agent} has no {wanted}")
    thread = AgentThread()

    async def run(base_url: str, task: Task, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        return await thread.call(function, f"{base_url}/v1", prompt_of(task), request_kwargs, metadata)

    return run


def check(rollout: RolloutConfig, run_dir: Path) -> None:
    """Raise ConfigError unless the agent exists and its sandbox, if any, works and hides ``run_dir``."""
    load(rollout)
    if rollout.agent_sandbox:
        CommandSandbox.of(shlex.split(rollout.agent), rollout.agent_paths, None).prove(run_dir)


class AgentThread:
    """An event loop in a separate thread, so that a blocking agent blocks other agents, but not the explorer."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await a coroutine function in the thread; cancelled with the caller. Raises AgentFault."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=[self._loop], name="agents", daemon=True).start()
        future: Future[Any] = asyncio.run_coroutine_threadsafe(_contained(function, *args), self._loop)
        return await asyncio.wrap_future(future)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the agents' loop, and continue it if an agent's task calls sys.exit."""
    while True:
        try:
            loop.run_forever()
        except BaseException as error:
            log.warning("a task of an agent raised %s", describe(error))


async def _contained(function: Callable[..., Any], *args: Any) -> Any:
    """Await a function; raise AgentFault for SystemExit, and for a CancelledError raised by the agent."""
    try:
        return await function(*args)
    except Exception:
        raise
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
            raise
        raise AgentFault(describe(error)) from error


def _command(words: list[str], rollout: RolloutConfig, endpoint: Path | None) -> Run:
    sandbox = CommandSandbox.of(words, rollout.agent_paths, endpoint) if rollout.agent_sandbox else None

    async def run(base_url: str, task: Task, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        given = {"prompt": prompt_of(task), "request_kwargs": request_kwargs, "metadata": metadata}
        return await run_command(words, given, command_environment(base_url, rollout.agent_env), sandbox)

    return run
