"""Queue of free reward workers, oldest first; dead ones are restarted."""

from __future__ import annotations

import asyncio
import logging
import time

from megarl.core.errors import ConfigError
from megarl.rewards.pool.process import START_TIMEOUT_S, Worker, WorkerError

log = logging.getLogger(__name__)

REVIVE_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds before each attempt to restart a dead worker; after the last the worker is given up (its host is gone)."""
STUCK_S = sum(REVIVE_DELAYS_S) + 2 * len(REVIVE_DELAYS_S) * START_TIMEOUT_S
"""Seconds in addition to ``reward.timeout_s`` for which all workers may be busy or starting without a fault of the
pool."""


class WorkerQueue:
    """Queue of free workers, used in turn.

    Args:
        size: Number of workers that will be added.
        timeout_s: Maximum seconds of a worker for one answer.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self._left = size
        self._timeout_s = timeout_s
        self.reason = ""
        """Reason why a worker last failed, or why none is left."""
        self._idle: asyncio.Queue[Worker | None] = asyncio.Queue()
        """Free workers; None marks a closed queue or no remaining worker."""
        self._freed_at = time.monotonic()
        """Time of the last put or get of a worker."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self) -> Worker | None:
        """Return the next free running worker; None if all have been given up. A worker that died while idle counts
        against no answer."""
        while True:
            worker = await self._next()
            if worker is None:
                self._idle.put_nowait(None)
                return None
            if worker.up:
                return worker
            self._restart(worker)

    def give_back(self, worker: Worker) -> None:
        """Put a worker back, restarting it first if it is down."""
        if worker.up:
            self._put_back(worker)
        else:
            self._restart(worker)

    async def close(self, reason: str) -> None:
        """Cancel waits for a worker, with ``reason``, and starts in progress."""
        self._give_up(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self) -> Worker | None:
        """Return the next idle worker; None after a wait so long that none can become idle."""
        limit_s = STUCK_S + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + self._freed_at + limit_s - time.monotonic()
                ):
                    worker = await self._idle.get()
                self._freed_at = time.monotonic()
                return worker
            except TimeoutError:
                if time.monotonic() - self._freed_at >= limit_s:
                    self._give_up(f"none has become free for {limit_s:.0f} s")

    def _put_back(self, worker: Worker) -> None:
        self._freed_at = time.monotonic()
        self._idle.put_nowait(worker)

    def _give_up(self, reason: str) -> None:
        """Close the queue: later answers do not wait for a worker."""
        self.reason = reason
        self._idle.put_nowait(None)

    def _restart(self, worker: Worker) -> None:
        task = asyncio.create_task(self._bring_up(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, worker: Worker) -> None:
        try:
            for delay_s in REVIVE_DELAYS_S:
                await asyncio.sleep(delay_s)
                try:
                    await worker.ready()
                    self._put_back(worker)
                    return
                except (WorkerError, ConfigError, TimeoutError, OSError) as error:
                    self.reason = str(error) or type(error).__name__
                    log.warning("a reward process does not come up: %s", self.reason)
        except Exception:
            self.reason = "an unexpected error, which is in the log"
            log.exception("a reward process does not come up")
        self._left -= 1
        log.error("a reward process is given up; %d are left", self._left)
        if not self._left:
            self._give_up(self.reason)
