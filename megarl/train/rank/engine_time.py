"""Share of a step in which the explorers had no sample under way at any engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megarl.buffer.store.workers import BusyTime

SILENCE_S = 40.0
"""Age of a report from which its explorer counts as ended: it reports every 10 s at least."""


class EngineIdleness:
    """Differences of what explorers have reported; a new explorer counts from the second look at it."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._looked = now()
        self._before: dict[str, float] = {}

    def share(self, times: Mapping[str, BusyTime]) -> float | None:
        """Idle share of the time since the last look, the mean over explorers; None where none was seen twice.

        Args:
            times: Present result of ``Store.workers.busy_times``.
        """
        now = self._now()
        passed, self._looked = now - self._looked, now
        seconds = {name: busy.until(now) for name, busy in times.items() if now - busy.at < SILENCE_S}
        # One that began again counts from 0.
        busy = [seconds[name] - before for name, before in self._before.items() if seconds.get(name, -1.0) >= before]
        self._before = seconds
        if not busy or passed <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - sum(busy) / len(busy) / passed))
