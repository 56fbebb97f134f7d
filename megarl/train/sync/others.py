"""Engines of explore programs, which come and go while a trainer of another program trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from megarl.core.errors import EngineError
from megarl.engine.client.control import EngineControl
from megarl.explore.store import Store
from megarl.explore.store.workers import Silence

log = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Seconds within which a program that is alive gives a heartbeat, since it was first seen."""
ANSWER_S = 10.0
"""Seconds within which an engine that is there answers."""


class EnginesOfOthers:
    """Finds the engines that are there: wanted, of a program that gives heartbeats, and answering. For rank 0.

    The key is sent to no address before its program has given a heartbeat here: a dead engine's port may be another
    user's by now.

    Args:
        silence_s: Silence after which a program counts as dead (``cluster.heartbeat_s``).
    """

    def __init__(self, store: Store, key: str, silence_s: float) -> None:
        self._store = store
        self._key = key
        self._silence_s = silence_s
        self._silence = Silence()
        self._left_out: Set[str] = frozenset()
        """Programs and engines that the last look left out."""

    def urls(self) -> Sequence[str]:
        """URLs of the engines, by program and number. None for a moment after a program was first seen: it may be
        alive, and an engine that a trainer leaves out keeps older weights."""
        beats, programs = self._store.workers.beats(), self._store.engines.programs()
        self._silence.look({program: beats.get(program, 0) for program in programs})
        alive = self._silence.alive(self._silence_s)
        if set(programs) - set(alive) - set(self._silence.longer_than(SETTLE_S)):
            return []
        faults = {program: f"no heartbeat of {program}" for program in programs if program not in alive}
        found = self._store.engines.read(alive)
        wanted = [engine.url for engine in found if engine.url and engine.is_present]
        if wanted:
            with ThreadPoolExecutor(len(wanted)) as pool:
                faults |= {url: why for url, why in zip(wanted, pool.map(self._fault, wanted), strict=True) if why}
        for left_out in sorted(faults.keys() - self._left_out):
            log.warning("engines of explore programs are left out: %s", faults[left_out])
        self._left_out = faults.keys()
        return [url for url in wanted if url not in faults]

    def _fault(self, url: str) -> str:
        """Return the reason why an engine is not there, "" where it is."""
        try:
            EngineControl(url, self._key).health(ANSWER_S)
        except EngineError as error:
            return str(error)
        return ""
