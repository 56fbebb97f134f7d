"""Time in which an explorer has samples under way at its engines, whichever rollouts they are of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from megarl.buffer.store import Store
from megarl.buffer.store.workers import BusyTime

SHORTEST_S, LONGEST_S = 0.2, 10.0
"""Shortest and longest time between two reports."""


class EngineTime:
    """Seconds with samples under way, reported to the store whenever the first one begins or the last one ends.

    Args:
        call: Calls a function of the store in the store's thread.
    """

    def __init__(
        self, store: Store, worker: str, call: Callable[..., Awaitable[Any]], now: Callable[[], float] = time.time
    ) -> None:
        self._store, self._worker, self._call, self._now = store, worker, call, now
        self._samples, self._busy_s, self._since = 0, 0.0, now()
        self._changed = asyncio.Event()

    def change(self, by: int) -> None:
        """``by`` more (or fewer) samples are under way."""
        before, self._samples = self._samples, self._samples + by
        if (before > 0) == (self._samples > 0):
            return
        now = self._now()
        if before > 0:
            self._busy_s += now - self._since
        self._since = now
        self._changed.set()

    def report(self) -> BusyTime:
        """Time so far."""
        return BusyTime(self._busy_s, self._since if self._samples > 0 else None, self._now())

    async def keep(self) -> None:
        """Report until cancelled."""
        while True:
            self._changed.clear()
            await self._call(self._store.workers.record_busy, self._worker, self.report())
            await asyncio.sleep(SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S):
                    await self._changed.wait()
