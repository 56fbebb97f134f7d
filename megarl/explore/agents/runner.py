"""Agents that megarl starts: a function of a user's file, or a command line for each trajectory."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from megarl.core.errors import ConfigError
from megarl.core.schema import Task
from megarl.core.user_file import import_file

OUTPUT_BYTES = 64 * 2**10
"""Last bytes of a command's output that are kept."""
RESULT = "MEGARL_RESULT"
"""A line of a command's stdout that begins so holds its result as JSON."""

Run = Callable[[str, Task, dict[str, Any], dict[str, Any]], Awaitable[Any]]
"""``await run(base_url, task, request_kwargs, metadata)``: the agent's result, or None where the verifier decides."""


def load(agent: str) -> Run:
    """Agent of ``rollout.agent``: ``run`` of a Python file, or a command. Raises ConfigError."""
    if not agent:
        raise ConfigError(
            "rollout.workflow=agent needs rollout.agent: a Python file (.py) with `async def run(base_url, prompt, "
            "request_kwargs, metadata)`, or a command line"
        )
    words = shlex.split(agent)
    if len(words) > 1 or not agent.endswith(".py"):
        return _command(words)
    wanted = "async def run(base_url, prompt, request_kwargs, metadata)"
    function = getattr(import_file(agent, "rollout.agent", wanted), "run", None)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.agent={agent} has no {wanted}")
    thread = AgentThread()

    async def run(base_url: str, task: Task, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        return await thread.call(function, f"{base_url}/v1", list(task.prompt), request_kwargs, metadata)

    return run


class AgentThread:
    """An event loop in a thread of its own, so that an agent that blocks stops other agents, but not the explorer."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await a coroutine function there; cancelled with the caller."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        future: Future[Any] = asyncio.run_coroutine_threadsafe(function(*args), self._loop)
        return await asyncio.wrap_future(future)


def _command(words: list[str]) -> Run:
    async def run(base_url: str, task: Task, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        given = {"prompt": list(task.prompt), "request_kwargs": request_kwargs, "metadata": metadata}
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(base_url),
            start_new_session=True,
        )
        try:
            stdout, stderr = await process.communicate(json.dumps(given).encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind too
            await process.wait()
        if process.returncode:
            last = stderr[-OUTPUT_BYTES:].decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"{words[0]} ended with status {process.returncode}: {last}")
        return _result(stdout[-OUTPUT_BYTES:].decode(errors="replace"))

    return run


def _environment(base_url: str) -> Mapping[str, str]:
    """Variables by which the libraries of both protocols find the endpoint; the job's key is not among them."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MEGARL_")}
    return {
        **own,
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "none",
    }


def _result(stdout: str) -> Any:
    """Raises ValueError for a result that is no JSON."""
    lines = [line for line in stdout.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT).strip()) if lines else None
