"""Orders for engines, from the store: the supervisor of their job carries them out and notes what they have become."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from sqlalchemy.exc import SQLAlchemyError

from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import ProcessKind
from megarl.explore.store import EngineStatus, RegisteredEngine, Store
from megarl.run.nodes.node import Spec, Started
from megarl.run.supervise.replace import Replacements, lacks_gpus

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks into the store."""
LOOK_OFTEN_S = 0.1


class EnginePlaces(Protocol):
    """Places of engines that an attempt did not begin with (``MoreEngines``)."""

    def place(self, number: int, workers: int) -> Started:
        """Return an engine of so many workers that is to be started. Raises ConfigError."""


class Earlier(NamedTuple):
    """An engine as it was before it was ordered to have other workers."""

    started: Started
    workers: int


class GivenUp(NamedTuple):
    """An order for an engine that does not start."""

    order: int
    why: str


class EngineOrders:
    """Orders for the engines of one attempt.

    A thread reads and writes the store, so that one which is away delays orders and holds nobody up.

    Args:
        store: Used by the thread alone, which closes it.
        grace_s: Seconds that an engine gets to end.
        workers: Of each engine that the attempt began with.
        more: Gives places to engines that are added; None has none.
        often: Each step has orders, for which the trainer waits: the log says nothing of them.
        beats: Give heartbeats for the program, by which a trainer of another one knows that its engines are there.
    """

    def __init__(
        self,
        store: Store,
        replacements: Replacements,
        grace_s: float,
        workers: int,
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
        self._workers: dict[int, int] = {}
        """Workers of engines that were added."""
        self._begun_with = workers
        self._earlier: dict[int, Earlier] = {}
        """Number of an engine that starts with other workers -> what it goes back to if it does not."""
        self._unchanged: dict[int, tuple[int, int]] = {}
        """Number of an engine that keeps its workers -> these, and the order for others that is taken back."""
        self._given_up: dict[int, GivenUp] = {}
        """Number of an engine -> the order for it that is given up."""
        self._last = ""
        """Reason why the job has no engine left that could serve; empty while it has one."""
        self._step = self._refilled = 0
        self._over = threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="engine orders").start()

    def carry_out(self, *, stopping: bool = False) -> None:
        """End or start engines as they are wanted; none is started in a job that is ``stopping``. Raises JobError where
        one cannot be started again, or the last one of the job does not start."""
        if self._last and not stopping:
            raise JobError(self._last)
        found, ended = {}, []
        if self._step > self._refilled:
            self._refilled = self._step
            self._replacements.refill()
        given_up = self._replacements.take_given_up()
        for engine in self._engines:
            if ProcessKind.ENGINE.named(engine.number) in given_up:
                self._give_up(engine, "it ended before it served; its log has its last words", start=not stopping)
        engines = [e for e in self._engines if not self._is_given_up(e)]
        unfit = [engine for engine in engines if self._is_unfit(engine)]
        for engine in engines:
            unit = ProcessKind.ENGINE.named(engine.number)
            is_absent = self._replacements.state(unit) is EngineStatus.ABSENT
            # Until all have the workers that they are to have, new ones might lack GPUs.
            waits = engine in unfit or lacks_gpus(self._replacements, unit)
            waits = waits or (bool(unfit) and not self._replacements.knows(unit))
            self._replacements.let_sleep(unit, engine.wanted is EngineStatus.ASLEEP)
            if engine.wanted is EngineStatus.ABSENT and not is_absent:
                log.log(self._level, "%s is ended, as ordered", unit)
                ended.append(unit)
            elif engine.wanted is EngineStatus.SERVING and is_absent and not (stopping or waits):
                self._begin(engine, unit)
        if ended:
            # A job that stops has little time, and an engine nothing to save.
            self._replacements.end(ended, 0.0 if stopping else self._grace_s)
        for engine in engines:
            unit = ProcessKind.ENGINE.named(engine.number)
            if engine.wanted is EngineStatus.SERVING and not self._replacements.knows(unit):
                continue
            state = self._replacements.state(unit)
            if state is EngineStatus.SERVING:
                self._earlier.pop(engine.number, None)
            found[engine.number] = (state, engine.done if engine in unfit else engine.orders)
        self._found = found
        if unfit and not stopping:
            self._fit_next(engines, [engine for engine in unfit if self._is_unfit(engine)])

    def _is_given_up(self, engine: RegisteredEngine) -> bool:
        """True for an engine whose last order, to be there, is given up."""
        given_up = self._given_up.get(engine.number)
        is_last = given_up is not None and given_up.order == engine.orders
        return is_last and engine.wanted is not EngineStatus.ABSENT

    def _is_unfit(self, engine: RegisteredEngine) -> bool:
        """True for an engine that has a place, and is to serve with other workers."""
        is_taken_back = self._unchanged.get(engine.number, (0, 0))[1] == engine.orders > 0
        if engine.wanted is not EngineStatus.SERVING or is_taken_back:
            return False
        unit = ProcessKind.ENGINE.named(engine.number)
        return self._replacements.knows(unit) and self._workers_of(engine) != engine.workers

    def _workers_of(self, engine: RegisteredEngine) -> int:
        return self._workers.get(engine.number, self._begun_with)

    def _fit_next(self, engines: Sequence[RegisteredEngine], unfit: Sequence[RegisteredEngine]) -> None:
        """Start one engine again with other workers, once all others serve: some always do where there are several.

        Others whose GPUs it needs end with it, until it is their turn.
        """
        state = self._replacements.state
        others = (e.number for e in engines if e not in unfit and e.wanted is EngineStatus.SERVING)
        names = map(ProcessKind.ENGINE.named, others)
        # One that is absent because an unfit engine has its GPUs comes after that engine.
        coming = [u for u in names if state(u) is not EngineStatus.SERVING and not lacks_gpus(self._replacements, u)]
        if not unfit or any(map(self._replacements.knows, coming)):
            return
        engine, units = unfit[0], {e.number: ProcessKind.ENGINE.named(e.number) for e in unfit}
        unit = units.pop(engine.number)
        earlier = Earlier(self._replacements.of(unit), self._workers_of(engine))
        log.info("%s is started again with %d workers instead of %d", unit, engine.workers, earlier.workers)
        self._replacements.end([unit], self._grace_s)
        self._earlier[engine.number] = earlier
        try:
            if self._more is None:
                raise ConfigError("engines of this job keep their places")
            added = self._more.place(engine.number, engine.workers)
            needs = set(_spec(added).gpus)
            self._replacements.end(
                [u for u in units.values() if needs & set(_spec(self._replacements.of(u)).gpus)], self._grace_s
            )
            self._put(engine.number, added, engine.workers)
        except (ConfigError, JobError) as error:
            self._give_up(engine, str(error))

    def _put(self, number: int, started: Started, workers: int, *, again: bool = False) -> None:
        """Start an engine in a place of its own, or ``again`` in one where it has served. Raises JobError."""
        unit = ProcessKind.ENGINE.named(number)
        self._replacements.add(started, again=again)
        self._workers[number], self._places[number] = workers, f"http://{_spec(started).listens}"
        if lacks_gpus(self._replacements, unit):
            raise JobError(f"another engine has GPUs of the place of {unit} by now")
        self._replacements.begin(unit)

    def _begin(self, engine: RegisteredEngine, unit: str) -> None:
        """Start an engine that is absent, in a place that it may have to be given first."""
        if self._replacements.knows(unit):
            log.log(self._level, "%s is started again, as ordered", unit)
            self._replacements.begin(unit)
        elif self._more is not None:
            try:
                added = self._more.place(engine.number, engine.workers)
                self._put(engine.number, added, engine.workers)
            except (ConfigError, JobError) as error:
                self._give_up(engine, str(error))
                return
            log.log(self._level, "%s is added, as ordered (%s)", unit, _spec(added).log)

    def _give_up(self, engine: RegisteredEngine, why: str, *, start: bool = True) -> None:
        """Leave an engine out that was added and does not start: the job had been well without it. One that was to
        have other workers has its earlier ones again, and those that had to follow it keep theirs."""
        if (earlier := self._earlier.pop(engine.number, None)) is None or not start:
            self._given_up[engine.number] = GivenUp(engine.orders, why)
            log.error("engine %d is not added: %s", engine.number, why)
            return
        log.error("engine %d has %d workers again: %s", engine.number, earlier.workers, why)
        for other in [engine, *filter(self._is_unfit, self._engines)]:
            workers = earlier.workers if other is engine else self._workers_of(other)
            self._unchanged[other.number] = (workers, other.orders)
        try:
            self._put(engine.number, earlier.started, earlier.workers, again=True)
        except JobError as error:
            self._give_up(engine, str(error))

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
            self._store.workers.beat(self._store.program)
        self._step = self._store.journal.last_step()
        found, self._engines = self._found, self._store.engines.own()
        for engine in self._engines:
            if self._is_given_up(engine) and not self._store.engines.give_up(engine.number, since=engine.orders):
                why = self._given_up[engine.number].why
                self._last = f"engine {engine.number} does not start, and no other one is wanted: {why}"
            workers, order = self._unchanged.get(engine.number, (engine.workers, engine.orders))
            if order == engine.orders and workers != engine.workers:
                self._store.engines.fit(engine.number, workers, since=order)
            if (url := self._places.get(engine.number, engine.url)) != engine.url:
                self._store.engines.place(engine.number, url)
            now = (engine.state, engine.done)
            if (noted := found.get(engine.number, now)) != now:
                self._store.engines.note(engine.number, *noted)


def _spec(started: Started) -> Spec:
    """Spec of a process that can be started again, as engines can."""
    assert started.spec is not None
    return started.spec
