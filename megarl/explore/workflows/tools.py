"""Responses and results of their tool calls in turn, until a response calls no tool."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.core.schema import End, Task
from megarl.explore.environments import EnvironmentFault
from megarl.explore.environments.types import in_thread
from megarl.explore.recording.model import RolloutModel, Workflow
from megarl.sandbox.selftest import local_sandbox
from megarl.tasks import ChatTokenizer
from megarl.tasks.templates.turns import messages_of, render_turns
from megarl.tasks.tools import FORMATS, ToolCall, written_by
from megarl.tasks.tools.functions import ToolFunction, python, text_of_result, tools_of
from megarl.tasks.tools.python_session import PythonSession, PythonSessions

NONE_LEFT = "Error: no tool calls are left. Answer without tools."
EMPTY = "(no output)"
PROBE = "result 0f1e"


class ToolTimeout(Exception):
    """A user's function timed out."""


@contextmanager
def serving_tools(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> Iterator[Workflow]:
    """Yield the workflow whose responses may call the tools of ``rollout.tools``. Raises ConfigError, SandboxError.

    It ends with a response that calls no tool, is truncated, or calls a tool after being told that no calls are left;
    or if a result has no room.
    """
    found, is_tool = tools_of(rollout), knows_results(tokenizer)
    sessions = _sessions(rollout, found)

    async def workflow(task: Task, model: RolloutModel) -> None:
        session = PythonSession(sessions) if sessions is not None else None
        try:
            await _turns(rollout, task, model, ToolCaller(rollout, found, task, session), is_tool)
        except ToolTimeout as timeout:
            model.fail(str(timeout), End.TOOL_TIMEOUT)
        finally:
            if session is not None:
                await session.close()

    try:
        yield workflow
    finally:
        if sessions is not None:
            sessions.close()


def check_tools(rollout: RolloutConfig) -> None:
    """Raise ConfigError unless all tools exist, ``python`` has a sandbox, and turns have room."""
    found = tools_of(rollout)
    if rollout.tool_format is not None and rollout.tool_format not in FORMATS:
        raise ConfigError(
            f"rollout.tool_format={rollout.tool_format!r} does not exist; choose one of {', '.join(FORMATS)}"
        )
    if rollout.max_trajectory_tokens is None:
        raise ConfigError(
            "rollout.max_trajectory_tokens is not set: a trajectory has room for one response; set it to the most "
            "tokens of a prompt, all responses and all results of tools"
        )
    if _has_python(found):
        try:
            local_sandbox(rollout.tool_python)
        except SandboxError as error:
            raise ConfigError(
                f"rollout.tools has python, which runs nothing unless it can be isolated on this machine (its "
                f"interpreter is rollout.tool_python): {error}"
            ) from error


def check_format(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError unless the model's calls can be parsed."""
    if rollout.tool_format is None and written_by(tokenizer.template) is None:
        raise ConfigError(
            f"rollout.tools={rollout.tools}: the chat template of model.path writes no tool calls that megarl can "
            "read; take a model whose template does, or describe the tools in the prompts and set rollout.tool_format "
            f"to one of {', '.join(FORMATS)}"
        )


def knows_results(tokenizer: ChatTokenizer) -> bool:
    """Return True if the chat template has a role for results of tools; else results become a user's message."""
    try:
        render_turns(tokenizer, messages_of("tool", [PROBE]))
    except DataError:
        return False
    return True


class ToolCaller:
    """Tools of one trajectory. A model's mistake returns an error as the result."""

    def __init__(
        self, rollout: RolloutConfig, tools: Mapping[str, ToolFunction], task: Task, session: PythonSession | None
    ) -> None:
        self._rollout, self._tools, self._task, self._session = rollout, tools, task, session
        self.schemas = [tool.schema for tool in tools.values()]
        self.left = rollout.max_tool_calls
        """Calls left to the trajectory; negative once a call was refused."""

    async def result(self, call: ToolCall) -> str:
        """Return the result's text for the model. Raises ToolTimeout with ``rollout.on_tool_timeout=end``,
        SandboxError."""
        self.left -= 1
        if self.left < 0:
            return NONE_LEFT
        if call.arguments is None:
            return "Error: a tool call must have the name of a tool and its arguments, in the form that was described."
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name!r:.80}; there are {', '.join(self._tools)}."
        try:
            tool.check(call.arguments)
        except ValueError as error:
            return f"Error: {error}."
        if tool.function is python:
            assert self._session is not None, "the sandbox is there wherever the tool is"
            return await self._session.run(call.arguments["code"]) or EMPTY
        return await self._returned(tool, call.arguments) or EMPTY

    async def _returned(self, tool: ToolFunction, arguments: Mapping[str, Any]) -> str:
        """Return the result of a function called in a separate thread; a timed-out call keeps its thread."""
        timeout_s, most = self._rollout.tool_timeout_s, self._rollout.tool_result_chars
        called = in_thread(lambda: _result(tool, arguments, self._task))
        try:
            async with asyncio.timeout(timeout_s):
                text = await asyncio.wrap_future(called)
        except TimeoutError as error:
            late = f"{tool.function.__name__} has not returned within {timeout_s:g} s"
            if self._rollout.on_tool_timeout == "end":
                raise ToolTimeout(f"the tool {late} (rollout.tool_timeout_s)") from error
            return f"Error: {late}."
        except EnvironmentFault as fault:  # any exception of the function
            text = f"Error: {fault}"
        return text if len(text) <= most else f"{text[:most]}\n({len(text) - most} more characters)"


async def _turns(rollout: RolloutConfig, task: Task, model: RolloutModel, caller: ToolCaller, is_tool: bool) -> None:
    model.ask(task)
    while True:
        response = await model.generate()
        ended = response.finish_reason == "stop"
        calls = model.tool_calls(response, rollout.tool_format, caller.schemas) if ended else []
        if not calls or caller.left < 0:
            return
        results = [await caller.result(call) for call in calls]
        messages, role = (results, None) if is_tool else (["\n\n".join(results)], "user")
        if model.add("tool", *messages, role=role) is None:
            return


def _result(tool: ToolFunction, arguments: Mapping[str, Any], task: Task) -> str:
    try:
        value = tool.call(arguments, task)
        return text_of_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:  # SystemExit too; the model does not need the user's traceback
        raise EnvironmentFault(f"{type(error).__name__}: {error}") from error


async def _awaited(value: Any) -> Any:
    return await value


def _sessions(rollout: RolloutConfig, tools: Mapping[str, ToolFunction]) -> PythonSessions | None:
    if not _has_python(tools):
        return None
    limits = rollout.tool_memory_mib, rollout.tool_timeout_s, rollout.max_tool_calls, rollout.tool_result_chars
    return PythonSessions(local_sandbox(rollout.tool_python), *limits)


def _has_python(tools: Mapping[str, ToolFunction]) -> bool:
    return any(tool.function is python for tool in tools.values())
