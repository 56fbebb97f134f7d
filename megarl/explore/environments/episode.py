"""One episode, whose calls run in daemon threads: so many of all episodes at once, each within a limit of time."""

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

    A thread runs one call. Python cannot end one that hangs, so a call past its limit keeps its thread, but its place
    goes to another call; no end of the process waits for it.

    Args:
        size: Most calls at once; others wait for their turn, which is not part of ``timeout_s``.
        timeout_s: Longest call.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.free = asyncio.Semaphore(size)
        self._timeout_s = timeout_s

    async def result(self, call: Future[T], what: str) -> T:
        """Wait for a call that has begun. Raises EnvironmentFault."""
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
        """The call that was made last; it may run on when nobody waits for it."""

    async def begin(self, make: MakeEnvironment, task: Task, given: Mapping[str, Any]) -> Observation | None:
        """Make the environment, with those of ``given`` that ``make`` has parameters for; return its first observation,
        where it has one beside the task's prompt."""
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
        """Give a response to the environment, with its score where it asks for one."""
        assert self._made is not None, "an episode begins before its first step"
        environment = self._made.result()
        async with self._threads.free:
            rule = "step must return an Observation"
            self._last = in_thread(lambda: _checked(environment.step(response, *score), Observation, rule))
            return await self._threads.result(self._last, "step")  # type: ignore[no-any-return]

    async def end(self) -> float:
        """Reward of an episode that a limit has ended, where the environment gives one."""
        assert self._made is not None, "an episode begins before its end"
        if (end := getattr(self._made.result(), "end", None)) is None:
            return 0.0
        async with self._threads.free:
            self._last = in_thread(lambda: _checked(end(), float, "end must return a float"))
            return await self._threads.result(self._last, "end")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the environment, if one was made, as soon as no call of it runs; waits only where none does. A call
        that runs is ended by ``kill()``, where the environment has it."""
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
    """Those of ``PARAMETERS`` that ``make`` has."""
    try:
        found = inspect.signature(make).parameters
    except (TypeError, ValueError):  # of some callables written in C
        return []
    return [name for name in PARAMETERS if name in found]


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call foreign code in a daemon thread; each exception of it becomes an EnvironmentFault."""
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

    call.set_running_or_notify_cancel()  # from here on it cannot be cancelled: a wait for it can
    threading.Thread(target=run, name="environment", daemon=True).start()
    return call


def _checked(given: T, kind: type | tuple[type, ...], rule: str) -> T:
    if not isinstance(given, kind):
        raise TypeError(f"{rule}, got {given!r:.60}")
    return given


def _close(made: Future[Environment]) -> None:
    if made.exception() is None:
        made.result().close()
