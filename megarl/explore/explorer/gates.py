"""Gates of an explore program's engines, by the way in which they get weights (``sync.method``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path

from megarl.core.config import Config
from megarl.core.config.job import StoreConfig
from megarl.core.published import whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engine.client.control import EngineControl
from megarl.engine.client.open import EVERY_S, EngineGate, GatedEngines, OpenEngines
from megarl.explore.explorer.weight_files import FileFedEngine
from megarl.explore.store import Store

FOLLOW_S = 0.1
"""Seconds between two looks for newer weights."""


def gated_engines(config: Config, urls: Sequence[str], key: str, number: int) -> GatedEngines:
    """Put these engines behind a gate of explorer ``number`` of a program, of which the first one gives them files."""
    if config.sync.method == "direct":
        return OpenEngines(urls, key)
    run_dir = Path(config.run.dir)
    controls = [EngineControl(url, key, config.sync.timeout_s) for url in urls]
    engines = [FileFedEngine(control, run_dir, by_another=number > 0) for control in controls]
    return FileFedEngines(engines, NewestVersion(run_dir, config.store))


class NewestVersion:
    """Looks for the newest version whose folder is whole and that the store knows: a trainer that was superseded may
    write files, but nothing into the store."""

    def __init__(self, run_dir: Path, store: StoreConfig) -> None:
        self._run_dir = run_dir
        self._store = store
        self._known: list[WeightsVersion] = []

    def __call__(self) -> WeightsVersion | None:
        """Return it; None before the first. Blocks. The store is asked where there are other folders than before."""
        whole = whole_versions(self._run_dir)
        if set(whole) - set(self._known):
            # A store is one thread's, and calls come from several.
            with closing(Store(self._store.url, read_only=True, outage_s=self._store.outage_s)) as store:
                self._known = sorted(store.pacing.version_steps(whole))
        return max(set(whole) & set(self._known), default=None)


class FileFedEngines:
    """Engines that are given the newest published weights from files, and behind a gate until one of them has them.

    Args:
        newest: The newest version that is whole, None before the first; blocks.
        every_s: Seconds between two looks for engines that were started again.
    """

    def __init__(
        self, engines: Sequence[FileFedEngine], newest: Callable[[], WeightsVersion | None], every_s: float = EVERY_S
    ) -> None:
        self.gate = EngineGate(self._ready, every_s)
        self._engines, self._every_s = engines, every_s
        self._newest = newest
        self._given = WeightsVersion(0, 0)
        """Newest that an engine was given."""
        self._feeding = asyncio.Lock()

    def replace(self, urls: Sequence[str], key: str) -> None:
        """Do nothing: an explorer gives files to the engines that it began with (``megarl scale`` starts no others)."""

    def expect(self, version: WeightsVersion) -> None:
        """Close the gate where samples of newer weights are asked for than the engines have."""
        if version > self._given:
            self.gate.doubt(version)

    async def keep(self, closed_s: float, closed: Callable[[], Awaitable[None]]) -> None:
        """Follow the published versions, until cancelled; call ``closed`` where the gate stays closed for so long and
        no engine is being given weights, for which requests under way are awaited.

        Raises EngineError where an engine computes with other weights than it was given.
        """

        async def unless_feeding() -> None:
            if not any(engine.updating for engine in self._engines):
                await closed()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.gate.keep(closed_s, unless_feeding))
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        fed = loop.time()
        while True:
            await self.gate.wait()
            await asyncio.sleep(FOLLOW_S)
            newest = await asyncio.to_thread(self._newest)
            if newest is not None and newest > self._given:
                self.gate.doubt(newest)
            elif loop.time() - fed > self._every_s:
                await self._feed()
                fed = loop.time()

    async def _ready(self) -> None:
        while not await self._feed():
            await asyncio.sleep(FOLLOW_S)

    async def _feed(self) -> bool:
        """Give all engines the newest weights; True where one has them, and they are new enough."""
        async with self._feeding:
            newest = await asyncio.to_thread(self._newest)
            if newest is None or newest < self.gate.oldest:
                return False
            given = await asyncio.gather(*(asyncio.to_thread(engine.give, newest) for engine in self._engines))
            if any(given):
                self._given = max(self._given, newest)
            return any(given)
