"""Engines that take weights, as trainer rank 0 finds them: the job's own, or those of explore programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from megarl.buffer.store import Store
from megarl.buffer.store.workers import Silence
from megarl.core.errors import EngineError
from megarl.engines.client.control import EngineControl
from megarl.engines.fleet import EngineRow, EngineStatus, Fleet

log = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Seconds within which a program that is alive gives a heartbeat, since it was first seen."""
ANSWER_S = 10.0
"""Seconds within which an engine that is there answers."""


class EngineLook:
    """Looks at the rows of engines, at the heartbeats of their programs, and whether the engines answer.

    Args:
        key: The job's key. It is sent to no engine of another program before that has given a heartbeat: a dead
            engine's port may be another user's by now.
        own: The engines are the job's own. Else an engine is there while its program gives heartbeats.
        together: All come and go at once, and are waited for (``rollout.placement=colocated``).
        begun: True once weights were published: own engines that start are waited for before that alone.
        silence_s: Silence after which another program counts as dead (``cluster.heartbeat_s``).
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        own: bool,
        together: bool = False,
        begun: Callable[[], bool] = lambda: True,
        silence_s: float = 0.0,
    ) -> None:
        self._store, self._key, self._silence_s = store, key, silence_s
        self.is_own, self._together, self._begun = own, together, begun
        self._silence = Silence()
        self._silent: Set[str] = frozenset()
        """Programs that the last look found silent."""
        self._left_out: Set[str] = frozenset()
        """Programs and engines of others that the last choice left out."""

    def fleet(self) -> Fleet:
        """Rows of now. Of other programs those that are alive; none for a moment after one was first seen: it may be
        alive, and an engine that a trainer leaves out keeps older weights."""
        if self.is_own:
            return Fleet(self._store.engines.own())
        beats, programs = self._store.workers.beats(), self._store.engines.programs()
        self._silence.look({program: beats.get(program, 0) for program in programs})
        alive = self._silence.alive(self._silence_s)
        is_settled = set(programs) <= {*alive, *self._silence.longer_than(SETTLE_S)}
        self._silent = set(programs) - set(alive) if is_settled else frozenset()
        return Fleet(self._store.engines.read(alive if is_settled else ()))

    def to_join(self) -> list[EngineRow] | None:
        """Engines that weights are delivered to, by program and number; None where all own ones are away by order.

        One that does not answer is left out while another own one answers; another program's always.
        """
        fleet, begun = self.fleet(), self._begun()
        chosen = fleet.to_join(begun=begun or not self.is_own, together=self._together)
        if not self.is_own:
            faults = self._faults(chosen)
            self._tell(faults | {program: f"no heartbeat of {program}" for program in self._silent})
            return [row for row in chosen if row.url not in faults]
        if not chosen:
            return None if fleet.rows else []
        if self._together or not begun or len(chosen) == 1:
            return chosen
        faults = self._faults(chosen)
        return [row for row in chosen if row.url not in faults] or chosen

    def _tell(self, faults: Mapping[str, str]) -> None:
        """Log once which programs, and engines of them, are left out."""
        for name in sorted(faults.keys() - self._left_out):
            log.warning("engines of explore programs are left out: %s", faults[name])
        self._left_out = faults.keys()

    def _faults(self, rows: Sequence[EngineRow]) -> dict[str, str]:
        """URL of each engine that is not there -> the reason."""
        if not rows:
            return {}
        with ThreadPoolExecutor(len(rows)) as pool:
            return {row.url: why for row, why in zip(rows, pool.map(self._fault, rows), strict=True) if why}

    def _fault(self, row: EngineRow) -> str:
        """Return the reason why an engine is not there, "" where it is."""
        try:
            EngineControl(row.url, self._key).health(ANSWER_S)
        except EngineError as error:
            return str(error)
        return ""


def lost(fleet: Fleet, given: Sequence[EngineRow]) -> str | None:
    """Say what is to be made good while answers of engines that were given weights are awaited; None for nothing.

    That is one that has died and was started again, or that none of them is left and others are. One that has other
    workers by order, as one that is added, waits for the next publication while others go on.
    """
    there = {row.key for row in fleet.present()}
    serving = [row for row in fleet.to_join(begun=True) if row.state is EngineStatus.SERVING]
    before = {row.key: row for row in given}
    goes_on = any(row.key in before and before[row.key].start == row.start for row in serving)
    for now in serving:
        row = before.get(now.key, now)
        has_other_workers = now.workers != (row.workers or row.wanted_workers)
        if row.start != now.start and not (has_other_workers and goes_on):
            return f"engine {now.number} was started again at {now.url}"
    if not serving or any(row.key in there for row in given):
        return None
    return f"no engine that was given the weights is there, and {', '.join(row.url for row in serving)} is"
