"""Lease of an explorer's claims: its heartbeats, and a check of other explorers' heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from megarl.buffer.store import Store
from megarl.buffer.store.workers import Silence
from megarl.explore.explorer.held_out import record_evaluations

BEATS = 4
"""Heartbeats of an explorer per heartbeat timeout."""


class Lease:
    """Sends an explorer's heartbeats and detects dead explorers, whose groups become free.

    Args:
        call: Calls a function of the store in the store's thread.
        silence_s: Silence after which a worker counts as dead.
    """

    def __init__(
        self, store: Store, worker: str, call: Callable[..., Awaitable[Any]], silence_s: float, beats: int = BEATS
    ) -> None:
        self._store, self._worker, self._call = store, worker, call
        self._silence_s, self._every_s = silence_s, silence_s / beats
        self._others = Silence(self._every_s)

    @property
    def silent(self) -> Collection[str]:
        """Names of workers found dead at the last look."""
        return self._others.longer_than(self._silence_s)

    async def keep(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await self._call(self._store.workers.beat, self._worker)
            self._others.look(await self._call(self._store.workers.beats))
            if self.silent:  # a dead explorer may have left an uncounted evaluation
                await self._call(record_evaluations, self._store, self._worker)
            await asyncio.sleep(self._every_s)
