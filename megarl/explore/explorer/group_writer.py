"""Writes ended groups into the store, those that end at about the same time in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from megarl.explore.store import EndedGroup


class GroupWriter:
    """Queue of ended groups.

    Args:
        write: ``Store.put_all`` in a thread of its own.
    """

    def __init__(self, write: Callable[[Sequence[EndedGroup]], Awaitable[list[bool]]]) -> None:
        self._write = write
        self._ended: list[tuple[EndedGroup, asyncio.Future[bool]]] = []
        self._writing = asyncio.Lock()

    async def put(self, group: EndedGroup) -> bool:
        """Write a group, with all others that end while the ones before are written; False if it is not ours now.

        Raises what ``write`` raises, for all groups that were written together.
        """
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ended.append((group, written))
        async with self._writing:
            if not written.done():
                ended, self._ended = self._ended, []
                try:
                    results = await self._write([group for group, _ in ended])
                except BaseException as error:
                    for _, future in ended:  # their tasks fail alike
                        if future is not written and not future.done():
                            future.set_exception(error) if isinstance(error, Exception) else future.cancel()
                    raise
                for (_, future), ours in zip(ended, results, strict=True):
                    if not future.done():  # else its task was cancelled
                        future.set_result(ours)
        return await written
