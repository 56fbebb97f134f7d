"""Process that runs a reward function: one JSON line in, one out. ``python -m megarl.rewards.pool.worker PARENT``.

The first line has the settings. Each request has an ``id``, which its reply repeats. After a reply with ``last`` the
process must be replaced. The process keeps no state and may be killed at any time. Stdout and stderr belong to the
function.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

from megarl.config.load import from_dict
from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError, DataError, SandboxError, describe
from megarl.core.imports import import_file
from megarl.core.processes.machine import die_with
from megarl.core.processes.secrets import hide_secrets
from megarl.core.text import as_written
from megarl.rewards.answer import trace
from megarl.rewards.math import verifier as math_verifier
from megarl.rewards.pool.child import SOCKET
from megarl.rewards.routes import Scorer, scorer_for
from megarl.rewards.verdict import to_verdict, weighed, with_question

ADDRESS_SPACE_BYTES = 8 * 2**30
"""Address space in bytes that a process with megarl's verifiers may use in addition to the forked one. An endlessly
growing expression then fails one answer, not the machine."""


GROWTH_BYTES = 2**30
"""Bytes by which a worker with megarl's verifiers may grow before it is replaced. SymPy caches the results of an answer
(``1<<10**10``); unbounded, they fill the machine's memory, and later answers fail."""
CPU_SHARE = 0.7
"""Share of ``reward.timeout_s`` that one of megarl's verifiers may compute; then the kernel ends the process. That is
the response's fault; time without a processor on a busy machine is not."""
FILE = "MEGARL_REWARD_FILE"
"""Environment variable with ``reward.path``, for processes that its function spawns."""
WRONG = {"score": 0.0, "status": "wrong"}
NOT_THE_RESPONSES = (DataError, SandboxError, OSError, ImportError)
"""Errors of megarl's verifiers that no response causes: rows, sandboxes, disks, networks, packages."""


def load_function(path: str) -> Callable[..., Any]:
    """Load ``compute_score`` of a user's file. Raises ConfigError when the file cannot be used."""
    function = getattr(import_file(path, "reward.path", "compute_score"), "compute_score", None)
    if not callable(function):
        raise ConfigError(
            f"reward.path={path} defines no function "
            f"compute_score(data_source, solution_str, ground_truth, extra_info=None)"
        )
    return function


class Function:
    """Reward function of the settings: a user's function, or megarl's verifiers, each created once."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._user = None
        if config.path is not None:
            os.environ[FILE] = config.path
            self._user = load_function(config.path)
        if self._user is None:
            bound_memory()
        self._scorers: dict[str, Scorer] = {}
        self._most_bytes = _peak_bytes() + GROWTH_BYTES
        self._loop = asyncio.new_event_loop()
        """One loop for all calls, so that an async function may keep its connections."""

    def prepare(self, data_source: str) -> None:
        if self._user is None and data_source not in self._scorers:
            self._scorers[data_source] = scorer_for(data_source, self._config)

    @property
    def spent(self) -> bool:
        """True if the process must be replaced: one of megarl's verifiers has used too much memory, or was interrupted
        in SymPy."""
        return self._user is None and (_peak_bytes() > self._most_bytes or math_verifier.interrupted())

    def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, question: str, in_thinking: bool
    ) -> dict[str, Any]:
        """Return the weighted verdict; see ``verdict.weighed``. ``question`` and ``in_thinking`` are for shape
        rewards."""
        if self._user is not None:
            result = self._user(
                data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
            )
        else:
            self.prepare(data_source)
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SHARE * self._config.timeout_s)
            text, info = as_written(solution_str, in_thinking), with_question(extra_info, question)
            result = verdict_of(self._scorers[data_source], text, ground_truth, info)
        if inspect.isawaitable(result):
            result = self._loop.run_until_complete(_awaited(result))
        return weighed(result, solution_str, question, in_thinking, self._config)

    def explain(self, **request: Any) -> dict[str, Any]:
        """Return ``score``'s verdict with its ``steps``: lists of kind, rule and text (``answer/trace.py``)."""
        with trace.recorded() as steps:
            verdict = self.score(**request)
        return {**verdict, "steps": steps}

    def describe(self, error: Exception) -> str:
        """Describe an error of ``score`` or ``explain``, with the line of the user's file if it is the user's."""
        return describe(error, self._config.path, self._user)


def bound_memory() -> None:
    """Let this process grow by ``ADDRESS_SPACE_BYTES`` at most."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def verdict_of(score: Scorer, text: str, ground_truth: Any, info: dict[str, Any]) -> Any:
    """Return the result of one of megarl's verifiers. An error that an empty response to the row does not cause makes
    the response wrong."""
    try:
        return to_verdict(score(text, ground_truth, info))
    except NOT_THE_RESPONSES:
        raise
    except Exception:
        to_verdict(score("", ground_truth, info))  # raises again if the row is at fault
        return WRONG


def stop_timers() -> None:
    """Stop this process's timers: one left by a call would interrupt a later call."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def serve(requests: IO[str], replies: IO[str]) -> None:
    """Reply to requests until their end. The first one has the settings; its reply states whether the function could be
    loaded."""
    try:
        request = _read(requests.readline(), "config")
        function = Function(from_dict(RewardConfig, request["config"]))
    except (ConfigError, _Malformed) as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"id": request.get("id"), "ready": True})
    own = os.getpid()
    for line in requests:
        number = None
        try:
            request = _read(line, "prepare", "score", "explain")
            number = request.get("id")
            try:
                reply = _perform(function, request)
            finally:
                stop_timers()
        except _Malformed as error:
            reply = {"error": str(error)}
        except Exception as error:  # the user's code may raise any exception; it becomes this sample's verdict
            reply = {"error": function.describe(error), "of_row": isinstance(error, DataError)}
        if os.getpid() != own:
            os._exit(0)  # forked by the function and returned here too: only the parent replies
        last = {"last": True} if function.spent else {}
        _reply(replies, {"id": number, **reply, **last})


def _perform(function: Function, request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request. Raises the function's exceptions."""
    if "prepare" in request:
        function.prepare(request["prepare"])
        return {"ready": True}
    if "explain" in request:
        return function.explain(**request["explain"])
    return function.score(**request["score"])


class _Malformed(ValueError):
    """An invalid request line."""


def _read(line: str, *kinds: str) -> dict[str, Any]:
    """Read a request of one of these kinds. Raises _Malformed."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"not a request of a reward pool: {type(error).__name__}: {error}") from error
    if not isinstance(request, dict) or not any(kind in request for kind in kinds):
        raise _Malformed(f"not a request of a reward pool: expected an object with {' or '.join(kinds)}")
    return request


def _reply(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def main(arguments: list[str]) -> None:
    hide_secrets()
    die_with(int(arguments[0]), signal.SIGKILL)  # even during a user's endless loop
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    connection.set_inheritable(False)  # not inherited by programs that the function starts
    requests, replies = (
        connection.makefile("r", encoding="utf-8", errors="replace"),
        connection.makefile("w", encoding="utf-8"),
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    serve(requests, replies)


if __name__ == "__mp_main__" and FILE in os.environ:
    # In a process that the function spawned: pickle looks up names of the file in this module.
    load_function(os.environ[FILE])

if __name__ == "__main__":
    main(sys.argv[1:])
