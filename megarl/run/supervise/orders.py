"""Orders for engines, from the store: the supervisor of their job carries them out and notes what they have become."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from sqlalchemy.exc import SQLAlchemyError

from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import ProcessKind
from megarl.explore.store import EngineStatus, RegisteredEngine, Store
from megarl.run.supervise.replace import Replacements

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks into the store."""
LOOK_OFTEN_S = 0.1


class EngineOrders:
    """Orders for the engines of one attempt.

    A thread reads and writes the store, so that one which is away delays orders and holds nobody up.

    Args:
        store: Used by the thread alone, which closes it.
        grace_s: Seconds that an engine gets to end.
        often: Each step has orders, for which the trainer waits: the log says nothing of them.
        beats: Give heartbeats for the program, by which a trainer of another one knows that its engines are there.
    """

    def __init__(
        self, store: Store, replacements: Replacements, grace_s: float, *, often: bool = False, beats: bool = False
    ) -> None:
        self._store = store
        self._replacements = replacements
        self._grace_s = grace_s
        self._beats = beats
        self._look_s = LOOK_OFTEN_S if often else LOOK_S
        self._level = logging.DEBUG if often else logging.INFO
        self._engines: Sequence[RegisteredEngine] = ()
        self._found: Mapping[int, tuple[EngineStatus, int]] = {}
        """Number of an engine -> its state, and the order that was carried out before it was looked at."""
        self._over = threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="engine orders").start()

    def carry_out(self, *, stopping: bool = False) -> None:
        """End or start engines as they are wanted; none is started in a job that is ``stopping``.

        Raises JobError where one cannot be started again.
        """
        found, ended = {}, []
        for engine in self._engines:
            unit = ProcessKind.ENGINE.named(engine.number)
            is_absent = self._replacements.state(unit) is EngineStatus.ABSENT
            self._replacements.let_sleep(unit, engine.wanted is EngineStatus.ASLEEP)
            if engine.wanted is EngineStatus.ABSENT and not is_absent:
                log.log(self._level, "%s is ended, as ordered", unit)
                ended.append(unit)
            elif engine.wanted is EngineStatus.SERVING and is_absent and not stopping:
                log.log(self._level, "%s is started again, as ordered", unit)
                self._replacements.begin(unit)
        if ended:
            # A job that stops has little time, and an engine nothing to save.
            self._replacements.end(ended, 0.0 if stopping else self._grace_s)
        for engine in self._engines:
            found[engine.number] = (self._replacements.state(ProcessKind.ENGINE.named(engine.number)), engine.orders)
        self._found = found

    def close(self) -> None:
        """Have the thread end, without a wait for it."""
        self._over.set()

    def _follow(self) -> None:
        while not self._over.wait(self._look_s):
            try:
                self.look()
            except (JobError, ConfigError, SQLAlchemyError) as error:  # others report it
                log.debug("orders for engines: %s", error)
        self._store.close()

    def look(self) -> None:
        """Read what is wanted, and write what has been found since the look before."""
        if self._beats:
            self._store.beat(self._store.program)
        found, self._engines = self._found, self._store.own_engines()
        for engine in self._engines:
            now = (engine.state, engine.done)
            if (noted := found.get(engine.number, now)) != now:
                self._store.note_engine(engine.number, *noted)
