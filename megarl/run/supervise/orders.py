"""Orders for engines, from the store: the supervisor of their job carries them out and notes what they have become."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from megarl.core.errors import FencedError, JobError
from megarl.core.jobs import ProcessKind
from megarl.explore.store import EngineStatus, Store
from megarl.run.supervise.replace import Replacements

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks into the store."""
AWAY_S = 10.0
"""The same after a store that could not be read."""


class EngineOrders:
    """Orders for the engines of one attempt. A store that is away delays them; it ends nothing.

    Args:
        store: One that fails at once (``outage_s`` 0).
        grace_s: Seconds that an engine gets to end.
    """

    def __init__(self, store: Store, replacements: Replacements, grace_s: float) -> None:
        self._store = store
        self._replacements = replacements
        self._grace_s = grace_s
        self._look_at = 0.0

    def carry_out(self) -> None:
        """Call often; once in LOOK_S it reads the store.

        Raises:
            JobError: an engine that is wanted again cannot be started.
            FencedError: another attempt has begun.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + AWAY_S
        with suppress(_StoreAway):
            for number, wanted, noted in self._read():
                unit = ProcessKind.ENGINE.named(number)
                state = self._replacements.state(unit)
                if wanted is EngineStatus.ABSENT and state is not EngineStatus.ABSENT:
                    log.info("%s is ended, as ordered", unit)
                    self._replacements.end(unit, self._grace_s)
                elif wanted is EngineStatus.SERVING and state is EngineStatus.ABSENT:
                    log.info("%s is started again, as ordered", unit)
                    self._replacements.begin(unit)
                if (state := self._replacements.state(unit)) is not noted:
                    self._note(number, state)
            self._look_at = time.monotonic() + LOOK_S

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _read(self) -> list[tuple[int, EngineStatus, EngineStatus]]:
        try:
            return [(engine.number, engine.wanted, engine.state) for engine in self._store.own_engines()]
        except JobError as error:
            raise _StoreAway from error

    def _note(self, number: int, state: EngineStatus) -> None:
        try:
            self._store.note_engine(number, state)
        except FencedError:
            raise
        except JobError as error:
            raise _StoreAway from error


class _StoreAway(Exception):
    pass
