"""One episode. Its calls run in daemon threads, with a limit on concurrent calls of all episodes and on their time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from megarl.core.errors import describe
from megarl.core.schema import Task
from megarl.explore.environments.types import (
    PARAMETERS,
    Environment,
    EnvironmentFault,
    EnvironmentTimeout,
    MakeEnvironment,
    Observation,
)

T = TypeVar("T")


class EpisodeThreads:
    """Threads of all episodes of an explorer.

    A thread runs one call. Python cannot kill a hanging thread, so a timed-out call keeps its thread but frees its
    slot; the process's exit does not wait for it.

    Args:
        size: Most concurrent calls; waiting for a slot does not count towards ``timeout_s``.
        timeout_s: Timeout of a call in seconds.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.free = asyncio.Semaphore(size)
        self._timeout_s = timeout_s

    async def result(self, call: Future[T], what: str) -> T:
        """Wait for a running call. Raises EnvironmentFault."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(call)
        except TimeoutError as error:
            raise EnvironmentTimeout(
                f"{what} has not returned within rollout.environment_timeout_s={self._timeout_s:g}"
            ) from error


class Episode:
    """Calls of one environment, one after another; each raises EnvironmentFault."""

    def __init__(self, threads: EpisodeThreads) -> None:
        self._threads = threads
        self._made: Future[Environment] | None = None
        self._last: Future[Any] = Future()
        """The last call; it may still run after its timeout."""

    async def begin(self, make: MakeEnvironment, task: Task, given: Mapping[str, Any]) -> Observation | None:
        """Make the environment, with the ``given`` values that ``make`` has parameters for; return its first
        observation after the task's prompt, or None."""
        settings = {name: given[name] for name in parameters(make)}
        async with self._threads.free:
            self._made = self._last = in_thread(lambda: make(task, **settings))
            environment = await self._threads.result(self._made, "make")
            if (reset := getattr(environment, "reset", None)) is None:
                return None
            rule = "reset must return a text or an Observation"
            self._last = in_thread(lambda: _checked(reset(), (str, Observation), rule))
            first = await self._threads.result(self._last, "reset")
            return first if isinstance(first, Observation) else Observation(first)

    async def step(self, response: str, *score: float) -> Observation:
        """Pass a response to the environment, with its score if it takes one."""
        assert self._made is not None, "an episode begins before its first step"
        environment = self._made.result()
        async with self._threads.free:
            rule = "step must return an Observation"
            self._last = in_thread(lambda: _checked(environment.step(response, *score), Observation, rule))
            return await self._threads.result(self._last, "step")  # type: ignore[no-any-return]

    async def end(self) -> float:
        """Return the environment's reward for an episode ended by a limit, else 0."""
        assert self._made is not None, "an episode begins before its end"
        if (end := getattr(self._made.result(), "end", None)) is None:
            return 0.0
        async with self._threads.free:
            self._last = in_thread(lambda: _checked(end(), float, "end must return a float"))
            return await self._threads.result(self._last, "end")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the environment, if made, once its last call has ended; waits only if no call runs. A running call is
        ended by ``kill()``, if the environment has it."""
        if self._made is None:
            return
        made = self._made
        if not self._last.done():
            if made.done():
                in_thread(getattr(made.result(), "kill", lambda: None))
            self._last.add_done_callback(lambda _: in_thread(lambda: _close(made)))
            return
        async with self._threads.free:
            await self._threads.result(in_thread(lambda: _close(made)), "close")


def parameters(make: MakeEnvironment) -> list[str]:
    """Return the ``PARAMETERS`` that ``make`` takes."""
    try:
        found = inspect.signature(make).parameters
    except (TypeError, ValueError):  # some callables written in C
        return []
    return [name for name in PARAMETERS if name in found]


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call foreign code in a daemon thread; its exceptions become EnvironmentFault."""
    call: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except EnvironmentFault as fault:
            call.set_exception(fault)
        except BaseException as error:  # SystemExit too
            call.set_exception(EnvironmentFault(describe(error)))
        else:
            call.set_result(result)

    call.set_running_or_notify_cancel()  # the call cannot be cancelled from here on, but a wait for it can
    threading.Thread(target=run, name="environment", daemon=True).start()
    return call


def _checked(given: T, kind: type | tuple[type, ...], rule: str) -> T:
    if not isinstance(given, kind):
        raise TypeError(f"{rule}, got {given!r:.60}")
    return given


def _close(made: Future[Environment]) -> None:
    if made.exception() is None:
        made.result().close()
