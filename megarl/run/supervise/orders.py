"""Orders for engines, from the store: the supervisor of their job carries them out and notes what they have become."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import ProcessKind
from megarl.explore.store import EngineStatus, RegisteredEngine, Store
from megarl.run.nodes.node import Started
from megarl.run.supervise.replace import Replacements

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks into the store."""
LOOK_OFTEN_S = 0.1


class EnginePlaces(Protocol):
    """Places of engines that an attempt did not begin with (``MoreEngines``)."""

    def place(self, number: int) -> Started:
        """Return an engine that is to be started. Raises ConfigError."""


class EngineOrders:
    """Orders for the engines of one attempt.

    A thread reads and writes the store, so that one which is away delays orders and holds nobody up.

    Args:
        store: Used by the thread alone, which closes it.
        grace_s: Seconds that an engine gets to end.
        more: Gives places to engines that are added; None has none.
        often: Each step has orders, for which the trainer waits: the log says nothing of them.
        beats: Give heartbeats for the program, by which a trainer of another one knows that its engines are there.
    """

    def __init__(
        self,
        store: Store,
        replacements: Replacements,
        grace_s: float,
        more: EnginePlaces | None = None,
        *,
        often: bool = False,
        beats: bool = False,
    ) -> None:
        self._store = store
        self._replacements = replacements
        self._grace_s = grace_s
        self._more = more
        self._beats = beats
        self._look_s = LOOK_OFTEN_S if often else LOOK_S
        self._level = logging.DEBUG if often else logging.INFO
        self._engines: Sequence[RegisteredEngine] = ()
        self._found: Mapping[int, tuple[EngineStatus, int]] = {}
        """Number of an engine -> its state, and the order that was carried out before it was looked at."""
        self._places: dict[int, str] = {}
        """URLs of engines that were added."""
        self._given_up: dict[int, int] = {}
        """Number of an engine that could not be added -> the order that asked for it."""
        self._step = self._refilled = 0
        self._over = threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="engine orders").start()

    def carry_out(self, *, stopping: bool = False) -> None:
        """End or start engines as they are wanted; none is started in a job that is ``stopping``.

        Raises JobError where one cannot be started again.
        """
        found, ended = {}, []
        if self._step > self._refilled:
            self._refilled = self._step
            self._replacements.refill()
        engines = [e for e in self._engines if self._given_up.get(e.number) != e.orders]
        for engine in engines:
            unit = ProcessKind.ENGINE.named(engine.number)
            is_absent = self._replacements.state(unit) is EngineStatus.ABSENT
            self._replacements.let_sleep(unit, engine.wanted is EngineStatus.ASLEEP)
            if engine.wanted is EngineStatus.ABSENT and not is_absent:
                log.log(self._level, "%s is ended, as ordered", unit)
                ended.append(unit)
            elif engine.wanted is EngineStatus.SERVING and is_absent and not stopping:
                self._begin(engine, unit)
        if ended:
            # A job that stops has little time, and an engine nothing to save.
            self._replacements.end(ended, 0.0 if stopping else self._grace_s)
        given_up = self._replacements.take_given_up()
        for engine in engines:
            unit = ProcessKind.ENGINE.named(engine.number)
            if unit in given_up:
                self._give_up(engine, "it ended before it served; its log has its last words")
            elif engine.wanted is EngineStatus.SERVING and not self._replacements.knows(unit):
                continue
            found[engine.number] = (self._replacements.state(unit), engine.orders)
        self._found = found

    def _begin(self, engine: RegisteredEngine, unit: str) -> None:
        """Start an engine that is absent, in a place that it may have to be given first."""
        if self._replacements.knows(unit):
            log.log(self._level, "%s is started again, as ordered", unit)
            self._replacements.begin(unit)
        elif self._more is not None:
            try:
                added = self._more.place(engine.number)
                self._replacements.add(added)
                self._replacements.begin(unit)
            except (ConfigError, JobError) as error:
                self._give_up(engine, str(error))
                return
            assert added.spec is not None
            self._places[engine.number] = f"http://{added.spec.listens}"
            log.log(self._level, "%s is added, as ordered (%s)", unit, added.spec.log)

    def _give_up(self, engine: RegisteredEngine, why: str) -> None:
        """Leave an engine out that was added and does not start: the job had been well without it."""
        self._given_up[engine.number] = engine.orders
        log.error("engine %d is not added: %s", engine.number, why)

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
        self._step = self._store.last_step()
        found, self._engines = self._found, self._store.own_engines()
        for engine in self._engines:
            if self._given_up.get(engine.number) == engine.orders and engine.wanted is not EngineStatus.ABSENT:
                self._store.order_engine(engine.number, EngineStatus.ABSENT, since=engine.orders)
            if (url := self._places.get(engine.number, engine.url)) != engine.url:
                self._store.place_engine(engine.number, url)
            now = (engine.state, engine.done)
            if (noted := found.get(engine.number, now)) != now:
                self._store.note_engine(engine.number, *noted)
