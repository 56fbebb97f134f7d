"""Search by trainer rank 0 for the engines that receive weights: the job's own, or engines of explore programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from megarl.buffer.store import Store
from megarl.buffer.store.engines import Silence
from megarl.core.errors import EngineError
from megarl.engines.client.control import EngineControl
from megarl.engines.fleet import EngineRow, EngineStatus, Fleet

log = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Seconds within which a live program gives a heartbeat after it was first seen."""
ANSWER_S = 10.0
"""Timeout in seconds for the health check of an engine."""


class EngineLook:
    """Checks the rows of engines, the heartbeats of their programs, and the health of the engines.

    Args:
        key: The job's key. An engine of another program gets it only after that program's heartbeat: a dead engine's
            port may belong to another user.
        own: True if the engines are the job's own. Other engines count while their program gives heartbeats.
        together: All engines turn together and are all waited for (``rollout.placement=colocated``).
        begun: True once weights were published; before that, starting engines of the job are waited for.
        silence_s: Seconds without heartbeat after which another program counts as dead (``cluster.heartbeat_s``).
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
        """Programs that were silent at the last check."""
        self._left_out: Set[str] = frozenset()
        """Names of other programs' engines and silent programs that the last choice skipped."""

    def fleet(self) -> Fleet:
        """Return the current rows; for other programs, rows of live ones. Return no rows for a moment after a program
        was first seen: it may be alive, and a skipped engine would keep older weights."""
        if self.is_own:
            return Fleet(self._store.engines.own())
        beats, programs = self._store.workers.beats(), self._store.engines.programs()
        self._silence.look({program: beats.get(program, 0) for program in programs})
        alive = self._silence.alive(self._silence_s)
        is_settled = set(programs) <= {*alive, *self._silence.longer_than(SETTLE_S)}
        self._silent = set(programs) - set(alive) if is_settled else frozenset()
        return Fleet(self._store.engines.read(alive if is_settled else ()))

    def to_join(self) -> list[EngineRow] | None:
        """Return the engines to deliver weights to, by program and number; None while all own ones are absent by order.

        An own engine without response is skipped if another responds; another program's engine always.
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
        """Log once which programs and engines are skipped."""
        for name in sorted(faults.keys() - self._left_out):
            log.warning("engines of explore programs are left out: %s", faults[name])
        self._left_out = faults.keys()

    def _faults(self, rows: Sequence[EngineRow]) -> dict[str, str]:
        """Return URL -> reason for each engine without response."""
        if not rows:
            return {}
        with ThreadPoolExecutor(len(rows)) as pool:
            return {row.url: why for row, why in zip(rows, pool.map(self._fault, rows), strict=True) if why}

    def _fault(self, row: EngineRow) -> str:
        """Return the reason why an engine is not healthy, or "" if it is."""
        try:
            EngineControl(row.url, self._key).health(ANSWER_S)
        except EngineError as error:
            return str(error)
        return ""


def lost(fleet: Fleet, given: Sequence[EngineRow]) -> str | None:
    """Return the reason to publish again while responses of the engines in ``given`` are awaited, or None.

    Reasons: an engine died and was started again; or none of ``given`` is left and others serve. While others go on, an
    engine with a changed number of workers, like a new engine, waits for the next publication."""
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
