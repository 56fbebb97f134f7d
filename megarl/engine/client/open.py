"""Gate in front of a program's engines: nothing is asked of them before a trainer of another program has given them
weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from megarl.core.errors import EngineError
from megarl.core.schema import WeightsVersion
from megarl.engine.client.control import EngineControl

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_S = 5.0
NO_WEIGHTS = WeightsVersion(0, 0)


class EngineGate:
    """Closed until one of some engines may be asked.

    Args:
        ready: Returns when one may, with weights that are not older than ``oldest``, however long that takes.
        every_s: Seconds between two looks at the gate while it is kept.
    """

    def __init__(self, ready: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._ready, self._every_s = ready, every_s
        self._opening: asyncio.Task[None] | None = None
        self.oldest = NO_WEIGHTS
        """Oldest weights with which an engine may be asked."""
        self.is_open = False
        """As the last look, or ``doubt``, has it."""

    def doubt(self, version: WeightsVersion) -> None:
        """Have the next ``wait`` look again: an engine has failed to sample with these weights, or later ones."""
        self.is_open = False
        self.oldest = max(self.oldest, version)

    async def wait(self) -> None:
        """Return when an engine may be asked, however long that takes."""
        while not self.is_open:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._open())
            await asyncio.shield(self._opening)

    async def keep(self, closed_s: float, closed: Callable[[], Awaitable[None]]) -> None:
        """Open the gate as soon as that may be, until cancelled; call ``closed`` where it stays closed for so long."""
        while True:
            try:
                async with asyncio.timeout(closed_s):
                    await self.wait()
            except TimeoutError:
                await closed()
            await asyncio.sleep(self._every_s)

    async def _open(self) -> None:
        await self._ready()
        self.is_open = True


class GatedEngines(Protocol):
    """Engines behind a gate, to which a trainer of another program gives weights."""

    @property
    def gate(self) -> EngineGate: ...

    def replace(self, urls: Sequence[str], key: str) -> None:
        """Have other engines from the next look on."""

    def expect(self, version: WeightsVersion) -> None:
        """Take note that samples of these weights, or later ones, are asked for next."""

    async def keep(self, closed_s: float, closed: Callable[[], Awaitable[None]]) -> None:
        """Keep the gate, and what gives the engines weights, until cancelled; as ``EngineGate.keep``."""


class OpenEngines:
    """Engines that a trainer gives weights over links: one may be asked that is up, does not refuse, and has the
    weights that are wanted."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._engines = [EngineControl(url, key) for url in urls]
        self.gate = EngineGate(self._ready, EVERY_S)

    def replace(self, urls: Sequence[str], key: str) -> None:
        """Have other engines from the next look on."""
        self._engines = [EngineControl(url, key) for url in urls]

    def expect(self, version: WeightsVersion) -> None:
        """Do nothing: a trainer with links gives weights before it asks for samples."""

    async def keep(self, closed_s: float, closed: Callable[[], Awaitable[None]]) -> None:
        """Keep the gate as ``EngineGate.keep`` does."""
        await self.gate.keep(closed_s, closed)

    async def _ready(self) -> None:
        waited = False
        while True:
            looks = [asyncio.to_thread(may_be_asked, engine, self.gate.oldest) for engine in self._engines]
            if any(await asyncio.gather(*looks)):
                return
            if not waited:
                log.info("no engine has the weights: waiting for a trainer to publish them")
            waited = True
            await asyncio.sleep(EVERY_S)


def may_be_asked(engine: EngineControl, oldest: WeightsVersion = NO_WEIGHTS) -> bool:
    """Return True if an engine is up, does not refuse, and has published weights that are not older. Blocks."""
    try:
        state = engine.state(ANSWER_S)
        return state.refusing is None and WeightsVersion.parse(state.version) >= oldest
    except (EngineError, ValueError):  # it is not up, or has the weights of the model's files
        return False
