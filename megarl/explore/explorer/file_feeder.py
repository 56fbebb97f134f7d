"""Loading of published weight files into an explore program's engines (``sync.method=checkpoint``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.config.job import StoreConfig
from megarl.core.published import whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl
from megarl.engines.client.engine_choice import EngineChoice
from megarl.engines.fleet import EngineRow, Key
from megarl.explore.explorer.weight_files import FileFedEngine

Delivered = Callable[[Mapping[Key, int], WeightsVersion | None], Awaitable[object]]

FOLLOW_S = 0.1
"""Seconds between two checks for newer weights."""


class NewestVersion:
    """Finds the newest version with a complete folder and a record in the store: a superseded trainer may write files,
    but cannot write to the store."""

    def __init__(self, run_dir: Path, store: StoreConfig) -> None:
        self._run_dir = run_dir
        self._store = store
        self._known: list[WeightsVersion] = []

    def __call__(self) -> WeightsVersion | None:
        """Return the version; None before the first. Blocks. Queries the store only if there are new folders."""
        whole = whole_versions(self._run_dir)
        if set(whole) - set(self._known):
            # A store may be used by one thread only, and several threads call this.
            with closing(Store(self._store.url, read_only=True, outage_s=self._store.outage_s)) as store:
                self._known = sorted(store.pacing.version_steps(whole))
        return max(set(whole) & set(self._known), default=None)


class FileFeeder:
    """Loads the newest published weights into a program's engines, and records them in the engines' rows.

    One explorer of a program has a feeder; the others read the rows.

    Args:
        engine_of: Returns the engine of a row, as an engine that loads files.
        newest: Returns the newest complete version, None before the first; blocks.
    """

    def __init__(
        self,
        engines: EngineChoice,
        engine_of: Callable[[EngineRow], FileFedEngine],
        newest: Callable[[], WeightsVersion | None],
    ) -> None:
        self._engines, self._engine_of, self._newest = engines, engine_of, newest

    @classmethod
    def of(cls, config: Config, engines: EngineChoice, key: str) -> FileFeeder:
        """Feeder of a job's engines."""
        run_dir, timeout_s = Path(config.run.dir), config.sync.timeout_s

        def engine_of(row: EngineRow) -> FileFedEngine:
            return FileFedEngine(EngineControl(row.url, key, timeout_s), run_dir)

        return cls(engines, engine_of, NewestVersion(run_dir, config.store))

    async def keep(self, delivered: Delivered) -> None:
        """Follow the published versions and the engines, until cancelled.

        Args:
            delivered: ``Store.engines.delivered``, in the store's thread.

        Raises EngineError if an engine computes with weights other than the published ones.
        """
        while True:
            newest = await asyncio.to_thread(self._newest)
            if newest is not None and (behind := self._engines.fleet.behind(newest)):
                await asyncio.gather(*(self._give(row, newest, delivered) for row in behind))
                await self._engines.look()
            await asyncio.sleep(FOLLOW_S)

    async def _give(self, row: EngineRow, version: WeightsVersion, delivered: Delivered) -> None:
        start = await asyncio.to_thread(self._engine_of(row).give, version)
        if start is not None:
            await delivered({row.key: start}, version)
        elif row.has is not None:
            await delivered({row.key: row.start}, None)
