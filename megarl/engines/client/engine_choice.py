"""The choice of the engine for the next call, from the engines' rows in the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from megarl.core.errors import EngineClosed, WeightsPassed
from megarl.core.schema import WeightsVersion
from megarl.engines.fleet import EngineRow, Fleet

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two reads of the store."""
SOON_S = 0.1
"""Seconds between two reads while samples wait for an engine."""
LEFT_OUT_S = 5.0
"""Seconds without requests to a failed engine while others live; otherwise a dead engine, with the fewest unfinished
samples, would be chosen."""
REFUSED_S = 1.0
"""Seconds without requests to an engine after a refusal, unless its row changes before."""
HOME_SHARE = 0.25
"""Largest excess of the home engine's unfinished samples over another's, as a share of the engines' mean."""
NO_WEIGHTS = WeightsVersion(0, 0)
"""Version older than any published one."""


class WantedWeights(NamedTuple):
    """Weights that may sample."""

    oldest: WeightsVersion | None = None
    newest: WeightsVersion | None = None
    rollout: str = ""
    """Evaluation rollout with reserved engines; empty for all others, which do not use these."""


class EngineChoice:
    """Chooses the engine of each call from the rows last read from the store.

    A row may be outdated: the engine then refuses, and is chosen again once its row has changed.

    Args:
        rows: The engines' rows at the start.
    """

    def __init__(self, rows: Sequence[EngineRow]) -> None:
        self.fleet = Fleet(rows)
        self._oldest = NO_WEIGHTS
        self.outstanding = Counter[str]()
        """URL of an engine -> its unfinished samples."""
        self.left_out = defaultdict[str, float](float)
        """URL of a failed engine -> time until which it is skipped."""
        self._refused: dict[str, tuple[EngineRow, float]] = {}
        """URL of an engine after a refusal -> its row then, and the time until which it is skipped."""
        self._samples: dict[str, bool] = {}
        """URL of an engine -> True if its last call returned a sample, False if it failed."""
        self._read: Callable[[], Awaitable[Sequence[EngineRow]]] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._looked = 0.0

    async def keep(self, read: Callable[[], Awaitable[Sequence[EngineRow]]]) -> None:
        """Follow the engines until cancelled; ``read`` returns their current rows."""
        self._read = read
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Read the engines' current rows."""
        self._looked = time.monotonic()
        if self._read is not None:
            self.see(await self._read())

    def see(self, rows: Sequence[EngineRow]) -> None:
        """Replace the engines' rows."""
        before, self.fleet = self.fleet, Fleet(rows)
        urls = [row.url for row in self.fleet.present()]
        if urls != [row.url for row in before.present()]:
            log.info("the job's engines are %s", ", ".join(urls) or "none")

    def expect(self, oldest: WeightsVersion | None) -> None:
        """Record the oldest weights of requested samples."""
        self._oldest = max(self._oldest, oldest or NO_WEIGHTS)

    @property
    def is_open(self) -> bool:
        """True if an engine has weights new enough for all requested samples."""
        return bool(self.usable(WantedWeights(self._oldest)))

    def usable(self, wanted: WantedWeights) -> list[EngineRow]:
        """Return the engines with the wanted weights."""
        found = self.fleet.usable(wanted.oldest, wanted.rollout)
        newest = wanted.newest
        return [row for row in found if row.url and (newest is None or row.has is None or row.has <= newest)]

    def is_held(self, rollout: str) -> bool:
        """True if engines keep their weights for this rollout."""
        return any(row.holds_for == rollout for row in self.fleet)

    def urls(self) -> list[str]:
        """Return the URLs of engines for requests without named weights; of all engines if none is open."""
        now = time.monotonic()
        found = self._unrefused(WantedWeights(self._oldest)) or self._unrefused(WantedWeights())
        living = [row for row in found if self.left_out[row.url] <= now] or found
        return [row.url for row in living or self.fleet.present() or self.fleet.rows if row.url]

    async def choose(self, wanted: WantedWeights, home: str = "") -> EngineRow:
        """Return the engine for a call: ``home``, unless it is busier than the others; else the one with the fewest
        unfinished samples that has not just failed.

        Raises EngineClosed if no engine is open now, WeightsPassed if none will have the weights again.
        """
        self.expect(wanted.oldest)
        if not (found := self._unrefused(wanted)):
            await self._look_soon()
            if not (found := self._unrefused(wanted)):
                raise self._none(wanted)
        now = time.monotonic()
        least = min(found, key=lambda row: (max(now, self.left_out[row.url]), self.outstanding[row.url]))
        at_home = next((row for row in found if row.url == home and self.left_out[home] <= now), None)
        if at_home is None:
            return least
        busier = self.outstanding[home] - self.outstanding[least.url]
        share = HOME_SHARE * sum(self.outstanding[row.url] for row in found)
        return at_home if busier * len(found) <= share else least

    @contextmanager
    def asking(self, url: str, samples: int) -> Iterator[Callable[[], None]]:
        """Count the samples requested from an engine; yields a function to call for each returned sample."""
        left = samples

        def gave() -> None:
            nonlocal left
            left -= 1
            self.outstanding[url] -= 1
            if time.monotonic() > self.left_out[url] and not self._samples.get(url, False):
                self._samples[url] = True  # a sample came in time before the failure
                log.info("the engine at %s is sampling", url)

        self.outstanding[url] += samples
        try:
            yield gave
        finally:
            self.outstanding[url] -= left

    def failed(self, url: str, why: object) -> None:
        """Record a failed call; the first one after a sample of the engine is logged."""
        self.left_out[url] = time.monotonic() + LEFT_OUT_S
        if self._samples.get(url, True):
            self._samples[url] = False
            log.warning("%s; requesting the samples of its failed calls again", why)

    def refused(self, row: EngineRow, why: object) -> None:
        """Record that an engine refused a request that fits its row; logged once per row."""
        if row.url not in self._refused or self._refused[row.url][0] != row:
            log.info("%s; the request goes to another engine, or to this one again", why)
        self._refused[row.url] = row, time.monotonic() + REFUSED_S

    def _refuses(self, row: EngineRow) -> bool:
        if row.url not in self._refused:
            return False
        then, until = self._refused[row.url]
        return then == row and until > time.monotonic()

    def _unrefused(self, wanted: WantedWeights) -> list[EngineRow]:
        return [row for row in self.usable(wanted) if not self._refuses(row)]

    async def _look_soon(self) -> None:
        """Read the rows soon, once for all concurrent waiters."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_later())
        await asyncio.shield(self._looking)

    async def _look_later(self) -> None:
        await asyncio.sleep(max(0.0, self._looked + SOON_S - time.monotonic()))
        await self.look()

    def _none(self, wanted: WantedWeights) -> EngineClosed | WeightsPassed:
        """Return the error for a call without an open engine."""
        oldest, newest, rollout = wanted
        if newest is not None:
            has = [row.has for row in self.fleet if row.has is not None and row.holds_for == rollout]
            fits = any((oldest or newest) <= version <= newest for version in has)
            if not fits and (rollout or any(version > newest for version in has)):
                return WeightsPassed(f"no engine has weights {newest} any more")
        weights = "" if oldest is None else f" with weights {oldest} or later"
        states = (f"engine {row.number} {self._state(row)}" for row in self.fleet)
        return EngineClosed(f"no engine may be asked{weights}: {', '.join(states) or 'there is none'}")

    def _state(self, row: EngineRow) -> str:
        weights = "no weights" if row.has is None else f"weights {row.has}"
        keeps = f" for {row.holds_for}" if row.holds_for else ""
        refuses = "; it refuses" if self._refuses(row) else ""
        return f"is {row.state} and has {weights}{keeps}{refuses}"
