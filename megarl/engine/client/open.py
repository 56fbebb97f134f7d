"""Gate in front of a program's engines: nothing is asked of them before a trainer of another program has given them
weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from megarl.core.errors import EngineError
from megarl.core.schema import WeightsVersion
from megarl.engine.client.control import EngineControl

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_S = 5.0
NO_WEIGHTS = WeightsVersion(0, 0)


class OpenEngines:
    """Shows when one of the engines may be asked: it is up, does not refuse, and has the weights that are wanted.

    Args:
        every_s: Seconds between two looks.
    """

    def __init__(self, urls: Sequence[str], key: str, every_s: float = EVERY_S) -> None:
        self._engines = [EngineControl(url, key) for url in urls]
        self._every_s = every_s
        self._oldest = WeightsVersion(0, 0)
        self._looking: asyncio.Task[None] | None = None
        self.is_open = False
        """As the last look, or ``doubt``, has it."""

    def replace(self, urls: Sequence[str], key: str) -> None:
        """Have other engines from the next look on."""
        self._engines = [EngineControl(url, key) for url in urls]

    def doubt(self, version: WeightsVersion) -> None:
        """Have the next ``wait`` look again: an engine has failed to sample with these weights, or later ones."""
        self.is_open = False
        self._oldest = max(self._oldest, version)

    def expect(self, version: WeightsVersion) -> None:
        """Take note that samples of these weights, or later ones, are asked for next. Nothing to do: a trainer with
        links gives weights before it asks."""

    async def wait(self) -> None:
        """Return when an engine may be asked, however long that takes."""
        while not self.is_open:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)

    async def keep(self, closed_s: float, closed: Callable[[], Awaitable[None]]) -> None:
        """Open the gate as soon as that may be, until cancelled; call ``closed`` where it stays closed for so long."""
        while True:
            try:
                async with asyncio.timeout(closed_s):
                    await self.wait()
            except TimeoutError:
                await closed()
            await asyncio.sleep(self._every_s)

    async def _look(self) -> None:
        waited = False
        while True:
            looks = [asyncio.to_thread(may_be_asked, engine, self._oldest) for engine in self._engines]
            states = await asyncio.gather(*looks)
            if any(states):
                self.is_open = True
                return
            if not waited:
                log.info("no engine has the weights: waiting for a trainer to publish them")
            waited = True
            await asyncio.sleep(self._every_s)


def may_be_asked(engine: EngineControl, oldest: WeightsVersion = NO_WEIGHTS) -> bool:
    """Return True if an engine is up, does not refuse, and has published weights that are not older. Blocks."""
    try:
        state = engine.state(ANSWER_S)
        return state.refusing is None and WeightsVersion.parse(state.version) >= oldest
    except (EngineError, ValueError):  # it is not up, or has the weights of the model's files
        return False
