"""All engines of a job, called at once from trainer rank 0."""

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
"""Seconds between two looks for engines that are to be joined no more, while others are waited for."""
_ABSENT_S = 0.02
"""Seconds between two looks for engines while all are absent by order."""
T = TypeVar("T")
Call = Callable[[int, EngineControl], T]
"""(number of the engine, its control) -> its result."""
_STATE_S = 10.0
"""Seconds within which a living engine returns its state."""


class EngineFleet:
    """Controls of the engines, in the order of their replicas."""

    def __init__(self, urls: Sequence[str], key: str, timeout_s: float) -> None:
        self._engines = [EngineControl(url, key, timeout_s) for url in urls]
        self.starts: list[int] = []
        """Starts of the engines, as the last ``wait_ready`` found them."""
        self.workers: list[int] = []
        """Workers of each of them."""

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
        """Call every engine in threads; leaving waits for all."""
        with ThreadPoolExecutor(max(len(self._engines), 1)) as pool:
            yield [pool.submit(call, i, engine) for i, engine in enumerate(self._engines)]

    def each(self, call: Call[T]) -> list[T]:
        """Call every engine at once; raise the first failure when all have returned."""
        with self.calling(call) as futures:
            return results(futures)

    def forget_starts(self) -> None:
        """Forget who was there: ``died`` finds nobody until ``wait_ready`` has found them again."""
        self.starts = []

    def wait_ready(
        self, start_s: float, stopping: Callable[[], bool], left_out: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Wait until every engine serves. Raises EngineError, also where ``left_out`` names one meanwhile."""
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
        """Fates of engines that have ended since ``wait_ready``, even where others are in their place by now.

        Empty when it never found them: it has waited for them long enough.
        """

        def fate(i: int, engine: EngineControl) -> str | None:
            try:
                replaced = engine.state(timeout_s=_STATE_S).start != self.starts[i]
            except EngineError as error:
                return str(error)
            return f"the engine at {engine.url} has been replaced" if replaced else None

        return [found for found in self.each(fate) if found is not None] if self.starts else []

    def close(self, reason: str) -> None:
        """Make every engine that still answers refuse generation, and ready for another update."""
        for engine in self._engines:
            with suppress(EngineError):
                engine.refuse(reason)
                engine.workers("megarl_abandon_update")


def await_wanted(
    engines: Callable[[], Sequence[EngineRow] | None], timeout_s: float, stopping: Callable[[], bool]
) -> Sequence[EngineRow]:
    """Engines to join; waits while all are away by order. Raises EngineError."""
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
    """Results of calls; raises the first failure."""
    return [future.result() for future in futures]


def failures(futures: Sequence[Future[Any]]) -> list[str]:
    """Errors of engines, which explain more than a lost connection; waits a moment for one that is about to come."""
    done, _ = wait(futures, timeout=1.0)
    return [str(error) for future in done if (error := future.exception()) is not None]
