"""All engines of a job, called in parallel from trainer rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any, TypeVar

from megarl.core.errors import EngineError
from megarl.core.processes import heartbeat
from megarl.engines.client.control import EngineControl
from megarl.engines.fleet import EngineRow

_LOOK_S = 1.0
"""Seconds between two checks for engines that are no longer wanted, while waiting for others."""
_ABSENT_S = 0.02
"""Seconds between two checks for engines while all are absent by order."""
T = TypeVar("T")
Call = Callable[[int, EngineControl], T]
"""(index of the engine, its control) -> result."""
_STATE_S = 10.0
"""Timeout in seconds for a live engine's state."""


class EngineFleet:
    """Controls of the engines, in replica order."""

    def __init__(self, urls: Sequence[str], key: str, timeout_s: float) -> None:
        self._engines = [EngineControl(url, key, timeout_s) for url in urls]
        self.starts: list[int] = []
        """Start of each engine, as of the last ``wait_ready``."""
        self.workers: list[int] = []
        """Number of workers of each engine."""

    @property
    def urls(self) -> list[str]:
        """URLs of the engines."""
        return [engine.url for engine in self._engines]

    def part(self, engines: Sequence[int]) -> EngineFleet:
        """Return a fleet of the engines with these numbers."""
        part = EngineFleet([], "", 0.0)
        part._engines = [self._engines[i] for i in engines]
        return part

    @contextmanager
    def calling(self, call: Call[T]) -> Iterator[list[Future[T]]]:
        """Call every engine in a thread; leaving the context waits for all."""
        with ThreadPoolExecutor(max(len(self._engines), 1)) as pool:
            yield [pool.submit(call, i, engine) for i, engine in enumerate(self._engines)]

    def each(self, call: Call[T]) -> list[T]:
        """Call every engine in parallel; raise the first failure after all calls have ended."""
        with self.calling(call) as futures:
            return results(futures)

    def forget_starts(self) -> None:
        """Forget the engines' starts: ``died`` returns nothing until the next ``wait_ready``."""
        self.starts = []

    def wait_ready(
        self, start_s: float, stopping: Callable[[], bool], left_out: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Wait until every engine serves. Raises EngineError, also if ``left_out`` names an engine during the wait."""
        over = Event()
        with self.calling(
            lambda i, engine: engine.wait_ready(start_s, stopping=lambda: over.is_set() or stopping())
        ) as futures:
            try:
                while wait(futures, timeout=_LOOK_S).not_done:
                    if gone := left_out():
                        raise EngineError(f"the engine at {gone[0]} is no longer to be joined")
            finally:
                over.set()
        results(futures)
        states = self.each(lambda i, engine: engine.state())
        self.starts = [state.start for state in states]
        self.workers = [state.workers for state in states]

    def died(self) -> list[str]:
        """Return the errors of engines that have ended since ``wait_ready``, even if others have replaced them.

        Return an empty list if ``wait_ready`` did not succeed: it already waited long enough.
        """

        def fate(i: int, engine: EngineControl) -> str | None:
            try:
                replaced = engine.state(timeout_s=_STATE_S).start != self.starts[i]
            except EngineError as error:
                return str(error)
            return f"the engine at {engine.url} has been replaced" if replaced else None

        return [found for found in self.each(fate) if found is not None] if self.starts else []

    def close(self, reason: str) -> None:
        """Make every reachable engine refuse generation, and be ready for another update."""
        for engine in self._engines:
            with suppress(EngineError):
                engine.refuse(reason)
                engine.workers("megarl_abandon_update")


def await_wanted(
    engines: Callable[[], Sequence[EngineRow] | None], timeout_s: float, stopping: Callable[[], bool]
) -> Sequence[EngineRow]:
    """Return the engines to join; wait while all are absent by order. Raises EngineError."""
    until = time.monotonic() + timeout_s
    while (rows := engines()) is None:
        if stopping() or time.monotonic() > until:
            raise EngineError("all engines of the job are absent by order; none was wanted again in time")
        heartbeat.beat()
        time.sleep(_ABSENT_S)
    if not rows:
        raise EngineError("the job has no engine: none is registered in its store")
    return rows


def results(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results of calls; raise the first failure."""
    return [future.result() for future in futures]


def failures(futures: Sequence[Future[Any]]) -> list[str]:
    """Return the engines' errors, which explain more than a lost connection; waits 1 s for late ones."""
    done, _ = wait(futures, timeout=1.0)
    return [str(error) for future in done if (error := future.exception()) is not None]
