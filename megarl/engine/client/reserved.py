"""Engines that an evaluation has for itself: they keep its weights while the others take newer ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from megarl.core.schema import WeightsVersion
from megarl.engine.client.control import EngineControl
from megarl.engine.client.open import EVERY_S, may_be_asked

log = logging.getLogger(__name__)


class ReservedEngines:
    """URLs of engines that nothing but an evaluation is asked of, until they have newer weights than its own.

    That is until the trainer has given them some: it does so once the evaluation has ended, or was given up.

    Args:
        key: The job's key.
        there: Returns the URLs of the engines that are wanted now: at another one somebody else may listen by then.
        newer: (engine, least weights) -> True if the engine has them and may be asked; blocks.
        every_s: Seconds between two looks.
    """

    def __init__(
        self,
        key: str,
        there: Callable[[], Sequence[str]],
        newer: Callable[[EngineControl, WeightsVersion], bool] = may_be_asked,
        every_s: float = EVERY_S,
    ) -> None:
        self._key, self._there, self._newer, self._every_s = key, there, newer, every_s
        self._until: dict[str, WeightsVersion] = {}
        """Least weights with which each engine is free again."""
        self._looking: asyncio.Task[None] | None = None

    def __contains__(self, url: object) -> bool:
        return url in self._until

    def reserve(self, urls: Sequence[str], version: WeightsVersion) -> None:
        """Reserve engines for samples of these weights. Safe to repeat."""
        following = WeightsVersion(version.attempt, version.n + 1)
        for url in urls:
            self._until[url] = max(following, self._until.get(url, following))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Free the engines that have newer weights, until none is reserved."""
        while self._until:
            await asyncio.sleep(self._every_s)
            for url, least in list(self._until.items()):
                if url not in self._there():
                    del self._until[url]
                    continue
                is_newer = await asyncio.to_thread(self._newer, EngineControl(url, self._key), least)
                if is_newer and self._until[url] == least:  # else it was reserved again meanwhile
                    del self._until[url]
                    log.info("the engine at %s has newer weights than the evaluation's: it samples for training", url)

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
