"""The engines of an explorer's job, as they come and go by orders in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from megarl.engine.client.client import EngineClient
from megarl.engine.client.control import EngineControl
from megarl.engine.client.open import GatedEngines, may_be_asked
from megarl.engine.fleet import EngineRow, EngineTurn
from megarl.explore.store import Store

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks into the store."""


def urls_to_ask(registered: Sequence[EngineRow]) -> list[str]:
    """Return the URLs of engines that are wanted: another process may have the port of one that was ended by order.

    Where none is wanted, all are away for a moment (colocated, or the only engine in a cold check) and are returned.
    """
    there = [engine for engine in registered if engine.url]
    return [e.url for e in there if e.is_present] or [e.url for e in there]


def urls_of_the_start(registered: Sequence[EngineRow], replicas: int) -> list[str]:
    """Return the URLs of the engines that the job began with. ``megarl scale`` keeps them where a function of
    ``reward.path`` may ask them as the judge."""
    return [engine.url for engine in registered if engine.url and engine.number < replicas]


class EngineCount(Protocol):
    """Number of engines that may be asked."""

    @property
    def count(self) -> int: ...

    async def keep(self, call: Callable[..., Awaitable[Any]]) -> None:
        """Follow the engines until cancelled; ``call`` calls a function of the store in the store's thread."""


class FixedCount:
    """Number of engines that stays."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def keep(self, call: Callable[..., Awaitable[Any]]) -> None:
        """Do nothing: the engines stay."""


class EngineFollower:
    """Has a client, and a gate, ask the engines that are wanted now; a new one as soon as it has the weights, and one
    that an evaluation has for itself for nothing else, whichever explorer evaluates.

    Args:
        key: The job's key.
        gated: The same engines behind a gate; None without one.
    """

    def __init__(self, store: Store, client: EngineClient, key: str, gated: GatedEngines | None) -> None:
        self.count = len(client.engines.urls)
        self._store, self._client, self._key, self._gated = store, client, key, gated
        self._engines = client.engines
        self._engines.followed = True

    async def keep(self, call: Callable[..., Awaitable[Any]]) -> None:
        """Follow the engines as ``EngineCount`` says. It looks before the explorer claims: that may start amid an
        evaluation."""
        while True:
            for version, urls in (await call(self._store.evaluations.keepers)).items():
                self._client.reserve(urls, version)
            await self.follow(await call(self._store.engines.own))
            await asyncio.sleep(EVERY_S)

    async def follow(self, registered: Sequence[EngineRow]) -> None:
        """Take in what is registered now."""
        wanted = [e.url for e in registered if e.url and e.is_present and e.turn is EngineTurn.HERE]
        if wanted and wanted != list(self._engines.urls):
            log.info("the job's engines are %s", ", ".join(wanted))
            self._engines.replace(wanted)
            if self._gated is not None:
                self._gated.replace(wanted, self._key)
        closed = self._engines.closed
        looks = [asyncio.to_thread(may_be_asked, EngineControl(url, self._key), self._engines.oldest) for url in closed]
        for url, has_weights in zip(closed, await asyncio.gather(*looks), strict=True):
            if has_weights:
                self._engines.open(url)
        self.count = len(self._engines.to_ask())
