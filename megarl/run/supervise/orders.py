"""Orders for engines, from the store: the supervisor of their job carries them out and notes what they have become."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from sqlalchemy.exc import SQLAlchemyError

from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import ProcessKind
from megarl.explore.store import EngineStatus, Store
from megarl.run.supervise.replace import Replacements

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks into the store."""


class EngineOrders:
    """Orders for the engines of one attempt.

    A thread reads and writes the store, so that one which is away delays orders and holds nobody up.

    Args:
        store: Used by the thread alone, which closes it.
        grace_s: Seconds that an engine gets to end.
    """

    def __init__(self, store: Store, replacements: Replacements, grace_s: float) -> None:
        self._store = store
        self._replacements = replacements
        self._grace_s = grace_s
        self._wanted: Mapping[int, EngineStatus] = {}
        self._states: Mapping[int, EngineStatus] = {}
        self._over = threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="engine orders").start()

    def carry_out(self) -> None:
        """End or start engines as they are wanted. Raises JobError where one cannot be started again."""
        states = {}
        for number, wanted in self._wanted.items():
            unit = ProcessKind.ENGINE.named(number)
            is_absent = self._replacements.state(unit) is EngineStatus.ABSENT
            if wanted is EngineStatus.ABSENT and not is_absent:
                log.info("%s is ended, as ordered", unit)
                self._replacements.end(unit, self._grace_s)
            elif wanted is EngineStatus.SERVING and is_absent:
                log.info("%s is started again, as ordered", unit)
                self._replacements.begin(unit)
            states[number] = self._replacements.state(unit)
        self._states = states

    def close(self) -> None:
        """Have the thread end, without a wait for it."""
        self._over.set()

    def _follow(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                engines = self._store.own_engines()
                self._wanted = {engine.number: engine.wanted for engine in engines}
                for engine in engines:
                    state = self._states.get(engine.number, engine.state)
                    if state is not engine.state:
                        self._store.note_engine(engine.number, state)
            except (JobError, ConfigError, SQLAlchemyError) as error:  # others report it
                log.debug("orders for engines: %s", error)
        self._store.close()
