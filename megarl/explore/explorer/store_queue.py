"""Writes of groups and segments into the store, those that end at about the same time in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class StoreQueue(Generic[T]):
    """Queue of what is to be written.

    Args:
        write: A write of many, such as ``Store.groups.put_all``, in a thread of its own; False for those that are no
            longer ours.
    """

    def __init__(self, write: Callable[[Sequence[T]], Awaitable[list[bool]]]) -> None:
        self._write = write
        self._queue: list[tuple[T, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, one: T) -> bool:
        """Write one, with all others that come while those before are written; False if it is not ours now.

        Whoever waits may be cancelled: what was queued is written all the same. Raises what ``write`` raises, for all
        that were written together.
        """
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((one, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await written

    async def _write_all(self) -> None:
        """Write until the queue is empty: a task of its own, which ends with nobody who waits."""
        while self._queue:
            queue, self._queue = self._queue, []
            try:
                results = await self._write([one for one, _ in queue])
            except BaseException as error:
                for _, future in queue:
                    if not future.done():
                        future.set_exception(error) if isinstance(error, Exception) else future.cancel()
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, future), ours in zip(queue, results, strict=True):
                if not future.done():  # else its task was cancelled
                    future.set_result(ours)
