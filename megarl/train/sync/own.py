"""Engines of the trainer's own job, of which one may come, go or die while the others serve."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.errors import EngineError
from megarl.engine.client.control import EngineControl
from megarl.engine.fleet import EngineStatus, EngineTurn
from megarl.explore.store import Store

ANSWER_S = 10.0
"""Seconds within which an engine that is there answers."""


class OwnEngines:
    """Finds the engines of this job that are to be given weights. For rank 0.

    Args:
        together: All engines come and go at once, and are waited for (``rollout.placement=colocated``).
    """

    def __init__(self, store: Store, key: str, *, together: bool) -> None:
        self._store = store
        self._key = key
        self._together = together

    def urls(self, *, begun: bool) -> Sequence[str] | None:
        """URLs of the engines that are wanted, by number; None where all are absent by order.

        One that does not answer is left out while another is there; the trainer waits for all of them only before it
        has ``begun``, and for any of them where none is there.
        """
        found = self._store.engines.own()
        wanted = [engine for engine in found if engine.url and engine.is_present]
        if not wanted:
            return None if found else []
        urls = [engine.url for engine in wanted]
        if self._together or not begun or len(urls) == 1:
            return urls
        # One that has just started answers before the supervisor notes that it serves; an absent one is still ending.
        there = [e.url for e in wanted if e.state is not EngineStatus.ABSENT and self._answers(e.url)]
        return there or urls

    def registered(self) -> list[str]:
        """URLs of the engines that are wanted, be they there or not; none of those that come and go together."""
        if self._together:
            return []
        return [e.url for e in self._store.engines.own() if e.url and e.is_present and e.turn is EngineTurn.HERE]

    def _answers(self, url: str) -> bool:
        try:
            EngineControl(url, self._key).health(ANSWER_S)
        except EngineError:  # it has died, or is ending
            return False
        return True
