"""One engine that reads published weights from files, and the check that it computes with them."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.errors import CheckpointError, EngineError, WeightsDiffer
from megarl.core.published import PublishedWeights, folder_of, whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl, EngineState
from megarl.engines.client.probe import check_probe

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
