"""Published weight files, loaded into an explore program's engines and checked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.config.job import StoreConfig
from megarl.core.errors import CheckpointError, EngineError, WeightsDiffer
from megarl.core.published import PublishedWeights, folder_of, whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl, EngineState
from megarl.engines.client.engine_choice import EngineChoice
from megarl.engines.client.probe import check_probe
from megarl.engines.fleet import EngineRow, Key

log = logging.getLogger(__name__)

ANSWER_S = 5.0
SHOWN = 4
_MODULUS = 1 << 64


class FileFedEngine:
    """Loads the weights of a version's folder into an engine. Its calls block.

    An interrupted update leaves the engine paused or refusing, so the next look retries it.
    """

    def __init__(self, control: EngineControl, run_dir: Path) -> None:
        self._control = control
        self._run_dir = run_dir

    def give(self, version: WeightsVersion) -> int | None:
        """Return the engine's start once it has proven these weights and generates; None if the engine is not up, or
        the version was deleted.

        Raises EngineError, also if the engine computes with other weights; it then refuses requests with that reason.
        """
        engine = self._control
        try:
            state = engine.state(ANSWER_S)
        except EngineError:  # starting, or dead and replaced later
            return None
        if state.version == str(version) and state.refusing is None and not state.paused:
            return state.start
        try:
            self._update(state, version)
        except (EngineError, CheckpointError, WeightsDiffer) as error:
            if not self._is_there(state.start) or version not in whole_versions(self._run_dir):
                log.warning("%s; the engine at %s is given weights again", error, engine.url)
                return None
            reason = f"weights {version} are refused by the engine at {engine.url}: {error}"
            with suppress(EngineError):
                engine.refuse(reason)
            raise EngineError(reason) from error
        return state.start

    def _update(self, state: EngineState, version: WeightsVersion) -> None:
        """Load and verify a version. Raises EngineError, CheckpointError, WeightsDiffer."""
        engine, began = self._control, time.monotonic()
        folder = folder_of(self._run_dir, version)
        published = PublishedWeights.read(folder)
        engine.workers("megarl_abandon_update")
        if _attempt(state.version) == version.attempt:
            engine.drain(lambda: False)
        else:  # requests of an earlier attempt are repeated
            engine.pause("abort")
        engine.workers("megarl_expect_files")
        engine.start()
        engine.update({"version": str(version), "folder": str(folder)})
        engine.finish(str(version))
        engine.reset_prefix_cache()
        check_pieces(published.digests, [worker["pieces"] for worker in engine.workers("megarl_piece_digests")])
        engine.refuse(f"weights {version} are being proven")
        engine.resume()
        probed = replace(engine, proving=True).probe(published.probe, decode=published.decode)
        difference = check_probe(probed, published.logp, published.tolerance).max_difference
        engine.refuse(None, str(version))
        log.info(
            "engine at %s: weights %s read from files, %d digests equal the trainer's, probe differs by %.2e (%.1f s)",
            engine.url,
            version,
            len(published.digests),
            difference,
            time.monotonic() - began,
        )

    def _is_there(self, start: int) -> bool:
        """Return True if this start of the server still replies."""
        try:
            return self._control.state(ANSWER_S).start == start
        except EngineError:
            return False


def _attempt(version: str) -> int | None:
    """Return the attempt that published an engine's weights; None for the model's files."""
    try:
        return WeightsVersion.parse(version).attempt
    except ValueError:
        return None


def check_pieces(published: Mapping[str, str], workers: Sequence[Iterable[Sequence[Any]]]) -> None:
    """Compare the weights in an engine's workers with the trainer's digests.

    Args:
        published: Logical tensor -> digest in hexadecimal.
        workers: (logical tensor, [from, to] of each axis, digest in hexadecimal) of each piece of a worker. Pieces of
            different workers are identical or disjoint.

    Raises:
        WeightsDiffer: with the names of the tensors.
    """
    found: dict[str, dict[str, int]] = defaultdict(dict)
    copies_differ = set()
    for pieces in workers:
        for tensor, box, digest in pieces:
            number = int(digest, 16)
            if found[tensor].setdefault(str(box), number) != number:
                copies_differ.add(tensor)
    sums = {tensor: f"{sum(boxes.values()) % _MODULUS:016x}" for tensor, boxes in found.items()}
    wrong = sorted(copies_differ | {n for n in published.keys() | sums.keys() if published.get(n) != sums.get(n)})
    if wrong:
        first = [
            f"{name}: published {published.get(name, 'nothing')}, found {sums.get(name, 'nothing')}"
            + (" in copies that differ" if name in copies_differ else "")
            for name in wrong[:SHOWN]
        ]
        more = f"; and {len(wrong) - SHOWN} more tensors" if len(wrong) > SHOWN else ""
        raise WeightsDiffer(f"the engine computes with other weights than were published: {'; '.join(first)}{more}")


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
