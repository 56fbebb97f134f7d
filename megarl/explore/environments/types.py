"""Interface of environments, and one episode: its calls run in daemon threads with limits.

Its calls run in daemon threads, with a limit on concurrent calls of all episodes and on their time.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, SupportsFloat, TypeVar

from megarl.core.errors import ConfigError, describe
from megarl.core.schema import End, Task

NUMBER = re.compile(r"-?\d+")
LONGEST = 18
"""Most characters of a number, so that it fits int64; Python refuses to parse thousands of digits."""


def last_number(response: str) -> int | None:
    """Return the last whole number of a response; None without one or if it is too long."""
    found = NUMBER.findall(response)
    return int(found[-1]) if found and len(found[-1]) <= LONGEST else None


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    """Raise ConfigError for an option."""
    raise ConfigError(f"rollout.options.{name}={value!r} {rule}")


def checked(
    environment: str, options: Mapping[str, Any], known: Mapping[str, Any], needed: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigError for an unknown option, a wrong type, or a missing required option.

    Args:
        known: Name -> its type, or a union of types.
        needed: Name of each required option -> an example.
    """
    for name, value in options.items():
        if name not in known:
            refuse(name, value, f"is no option of rollout.environment={environment}, which has {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            kind = getattr(known[name], "__name__", str(known[name]))
            refuse(name, value, f"must be a {kind} for rollout.environment={environment}")
    for name, example in (needed or {}).items():
        if not options.get(name):
            raise ConfigError(
                f"rollout.options.{name} is not set, which rollout.environment={environment} needs; set it to such as "
                f"{example}"
            )


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a response."""

    text: str
    """Next message to the model; ignored if ``done``."""
    reward: float = 0.0
    """Reward of the response. A trajectory's score is the sum over its responses."""
    done: bool = False
    """True if the episode has ended."""
    success: bool | None = None
    """Outcome of an ended episode; None: success if its score is 1.0 or more."""
    images: Sequence[bytes] = ()
    """Files of the images for the text's ``<image>`` placeholders; without placeholders they precede the text."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Observation.text must be a text, got {self.text!r:.60}")
        if isinstance(self.images, bytes) or not all(isinstance(image, bytes) for image in self.images):
            raise TypeError(f"Observation.images must be files of images, each in bytes, got {self.images!r:.60}")
        if not isinstance(self.reward, SupportsFloat) or not math.isfinite(self.reward):
            raise ValueError(f"Observation.reward must be a finite number, got {self.reward!r:.60}")
        for name, value in (("done", self.done), ("success", self.success)):
            if value not in (0, 1) and (name, value) != ("success", None):  # any text is truthy
                raise ValueError(f"Observation.{name} must be True or False, got {value!r:.60}")


PARAMETERS = ("seed", "group_seed", "limits", "count_tokens", "options")
"""Parameters that ``make`` may take: the trajectory's seed for all randomness of the episode, unchanged by retries; the
group's seed for randomness shared by its trajectories; lengths (``recording.limits.TokenLimits``); a function that
counts the tokens of a text; ``rollout.options``."""


class EnvironmentFault(Exception):
    """An environment has raised an exception."""

    cause = End.ENVIRONMENT_ERROR


class EnvironmentTimeout(EnvironmentFault):
    """A call of an environment timed out."""

    cause = End.ENVIRONMENT_TIMEOUT


class Environment(Protocol):
    """One episode of a task. Its methods are called in threads, one after another, and may block for
    ``rollout.environment_timeout_s``."""

    # def reset(self) -> str | Observation: optional first observation after the task's prompt def end(self) -> float:
    # optional further reward after a limit of the trajectory def kill(self) -> None: optional; make a timed-out call
    # raise, before close

    def step(self, response: str, /, *args: Any, **kwargs: Any) -> Observation:
        """Take a response of the model, without special tokens, and its score if ``make.asks_verifier``. A thinking
        model's response begins with the thought: act on ``core.thoughts.without_thought(response)``. An exception ends
        the episode without a verdict."""
        ...

    def close(self) -> None:
        """Free the episode's resources; called once after any end, while no other call runs."""
        ...


class MakeEnvironment(Protocol):
    """``make(task)`` begins an episode; further parameters are passed by name (``PARAMETERS``). The first observation
    is the task's prompt, followed by the result of ``reset()`` if defined. If ``make.asks_verifier`` is true, ``step``
    also gets each response's score from the task's verifier."""

    def __call__(self, task: Task, *args: Any, **kwargs: Any) -> Environment: ...


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
