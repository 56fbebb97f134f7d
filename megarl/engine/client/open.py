"""Gate in front of a program's engines: nothing is asked of them before a trainer of another program has given them
weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from megarl.core.errors import EngineError
from megarl.engine.client.control import EngineControl

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_S = 5.0


class OpenEngines:
    """Shows when one of the engines may be asked: it is up and does not refuse.

    Args:
        every_s: Seconds between two looks.
    """

    def __init__(self, urls: Sequence[str], key: str, every_s: float = EVERY_S) -> None:
        self._engines = [EngineControl(url, key) for url in urls]
        self._every_s = every_s
        self._looking: asyncio.Task[None] | None = None
        self.is_open = False
        """As the last look, or ``doubt``, has it."""

    def doubt(self) -> None:
        """Have the next ``wait`` look again: an engine has failed."""
        self.is_open = False

    async def wait(self) -> None:
        """Return when an engine may be asked, however long that takes."""
        while not self.is_open:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)

    async def _look(self) -> None:
        waited = 0
        while True:
            states = await asyncio.gather(*(asyncio.to_thread(_may_be_asked, engine) for engine in self._engines))
            if any(states):
                self.is_open = True
                return
            if waited == 0:
                log.info("no engine has weights: waiting for a trainer to publish them")
            waited += 1
            await asyncio.sleep(self._every_s)


def _may_be_asked(engine: EngineControl) -> bool:
    try:
        return engine.state(ANSWER_S).refusing is None
    except EngineError:
        return False
