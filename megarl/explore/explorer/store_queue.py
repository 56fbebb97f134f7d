"""Writes of groups and segments into the store, batched into one transaction if they end close together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class StoreQueue(Generic[T]):
    """Queue of items to write.

    Args:
        write: Writes many items, such as ``Store.groups.put_all``, in a separate thread; returns False for each with an
            outdated claim.
    """

    def __init__(self, write: Callable[[Sequence[T]], Awaitable[list[bool]]]) -> None:
        self._write = write
        self._queue: list[tuple[T, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, one: T) -> bool:
        """Write one item, batched with others queued during the previous write; return False if its claim is outdated.

        A cancelled caller does not stop the write. Raises the exceptions of ``write``, for the whole batch.
        """
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((one, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await written

    async def _write_all(self) -> None:
        """Write until the queue is empty, as a separate task that cancelled callers do not end."""
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
                if not future.done():  # else the caller was cancelled
                    future.set_result(ours)
