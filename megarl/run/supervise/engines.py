"""Supervision of a job's engines: reads their rows in the store, and starts, ends, replaces and adds engines."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from sqlalchemy.exc import SQLAlchemyError

from megarl.buffer.store import EngineRoom, Store
from megarl.config import Config
from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import ProcessKind, kind_of, unit_of
from megarl.engines.client.names import START
from megarl.engines.fleet import (
    COLUMNS,
    STARTS,
    ColumnOwner,
    EngineAction,
    EngineProcess,
    EngineRow,
    EngineStatus,
    EngineTurn,
    Replacements,
    change,
    decide,
    is_unfit,
)
from megarl.run.checks.settings import check_memory_of_engine
from megarl.run.nodes.node import LocalNode, NotStarted, Spec, Started
from megarl.run.nodes.plan import NodeInfo, Plan, plan_job
from megarl.run.supervise.process_specs import another_engine, engine_environment
from megarl.run.supervise.process_units import Units, ending, failed, is_engine


def room_for_engines(config: Config, plan: Plan, nodes: Sequence[NodeInfo], cpus: int | None = None) -> EngineRoom:
    """Return a job's room for engines: GPUs without trainer ranks, or on CPUs one worker per CPU.

    ``rollout.replicas`` engines always fit; a job on several nodes has no room for more.

    Args:
        cpus: CPUs of this machine; None counts the CPUs that this process may use.
    """
    had = config.rollout.replicas
    if plan.takes_turns:
        return EngineRoom(had, 0, "rollout.placement=colocated")
    if len(nodes) > 1:
        return EngineRoom(had, 0, f"{len(nodes)} nodes")
    if config.parallel.backend == "nccl":
        ranks = len(plan.of(ProcessKind.TRAINER))
        why = f"{nodes[0].gpus} GPUs, {ranks} of them the trainer's (parallel)"
        return EngineRoom(had, nodes[0].gpus - ranks, why)
    cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return EngineRoom(had, cpus, f"{cpus} CPUs")


def with_engines(config: Config, number: int, workers: int) -> Config:
    """Return the settings with ``number`` engines of ``workers`` workers each."""
    rollout = replace(config.rollout, replicas=number, tp=workers // config.rollout.pp)
    return replace(config, rollout=rollout)


class MoreEngines:
    """Places engines on this machine that are added after an attempt's start.

    Args:
        started: Processes of the attempt.
    """

    def __init__(self, config: Config, started: Sequence[Started]) -> None:
        self._config = config
        self._like = next((s for s in started if kind_of(s.process.name) is ProcessKind.ENGINE), None)

    def place(self, number: int, workers: int) -> Started:
        """Return an engine with ``workers`` workers, not started yet. Raises ConfigError if it does not fit."""
        like = self._like
        if like is None or like.spec is None or not isinstance(like.node, LocalNode):
            raise ConfigError("engines are added to jobs of one machine only")
        config = with_engines(self._config, number + 1, workers)
        check_memory_of_engine(config)
        plan = plan_job(config, [NodeInfo.of(like.node)])
        own = engine_environment(self._config.rollout)  # the environment depends on the number of workers
        env = {name: value for name, value in like.spec.env.items() if name not in own}
        address = f"{like.node.address}:{like.node.another_port()}"
        spec = another_engine(config, plan, number, address, like.spec.log, env)
        return Started(NotStarted(spec.name, Path(spec.log)), like.node, spec)


log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two reads of the store."""
LOOK_OFTEN_S = 0.1


class EnginePlaces(Protocol):
    """Places of engines added after an attempt's start (``MoreEngines``)."""

    def place(self, number: int, workers: int) -> Started:
        """Return an engine with ``workers`` workers, not started yet. Raises ConfigError."""


class Look(NamedTuple):
    """Result of one read of the store."""

    rows: Sequence[EngineRow]
    removed: Collection[int]
    """Numbers of deleted rows."""
    step: int
    """Last step that the trainer has recorded."""


def first_rows(placed: Sequence[Spec], program: str, attempt: int, workers: int, *, away: bool) -> list[EngineRow]:
    """Return the rows of an attempt's first engines, and write the number of each engine's start into its environment.

    Args:
        placed: Processes of the attempt. An engine's parts on other nodes than its server do not listen.
        workers: Workers of each engine.
        away: The engines take turns with the trainer, which begins.
    """
    rows: dict[int, EngineRow] = {}
    for spec in placed:
        if not is_engine(spec.name):
            continue
        number = int(unit_of(spec.name).rpartition(" ")[2])
        start = attempt * STARTS + number + 1
        spec.env[START] = str(start)
        url = f"http://{spec.listens}" if spec.listens else ""
        row = EngineRow(program, number, wanted_workers=workers, url=url)
        here = replace(row, state=EngineStatus.STARTING, start=start)
        rows.setdefault(number, replace(row, turn=EngineTurn.AWAY) if away else here)
    return list(rows.values())


class EngineSupervisor:
    """Starts and ends the engines of one attempt as their rows require (``fleet.decide``).

    Only the supervisor writes its columns of the rows. It goes on while the store is unreachable.

    Args:
        rows: Rows of the attempt's first engines.
        grace_s: Seconds for an engine to end.
        more: Chooses places for added engines and for a new number of workers; None refuses both.
        often: Engines start and end in every step, so these events are logged at debug level.
    """

    def __init__(
        self,
        rows: Sequence[EngineRow],
        units: Units,
        replacements: Replacements,
        grace_s: float,
        more: EnginePlaces | None = None,
        *,
        often: bool = False,
    ) -> None:
        self.rows: Mapping[int, EngineRow] = {row.number: row for row in rows}
        """Rows of the engines by number, with this supervisor's changes."""
        self._units, self._replacements = units, replacements
        self._grace_s, self._more = grace_s, more
        self._level = logging.DEBUG if often else logging.INFO
        self._workers = {row.number: row.wanted_workers for row in rows}
        """Workers of the last start of each engine."""
        self.places = {(row.number, row.wanted_workers): units.members(_unit(row.number)) for row in rows}
        """(number of an engine, its workers) -> processes placed for it."""
        self._starts = max((row.start for row in rows), default=0)
        self._failed: dict[int, EngineProcess] = {}
        """Starts that failed before a process existed."""
        self._step = 0
        self.removing: Collection[int] = ()
        """Engines whose rows are to be deleted."""

    def take(self, look: Look) -> None:
        """Apply the rows that other processes have written."""
        if look.step > self._step:
            self._step = look.step
            self._replacements.refill()
        taken = {}
        for row in look.rows:
            mine = None if row.number in look.removed else self.rows.get(row.number)
            own = {name: getattr(mine, name) for name in COLUMNS[ColumnOwner.SUPERVISOR]} if mine is not None else {}
            taken[row.number] = replace(row, **own)
        self.rows = taken
        self.removing = ()

    def act(self, *, stopping: bool = False) -> bool:
        """End and start engines as their rows require; return False if a death ends the attempt.

        Args:
            stopping: The job is ending: start no engine, and end engines without a grace period.

        Raises JobError if no engine is left, or an engine cannot be started.
        """
        rows = [self.rows[number] for number in sorted(self.rows)]
        actions = decide(rows, self._processes(), self._replacements, stopping=stopping)
        for action in actions:
            if action.what == "fail":
                return self._failure(action)
        self._end(actions, 0.0 if stopping else self._grace_s)
        for action in actions:
            if action.what == "write":
                self._write(action.number, action.event, **action.values)
            elif action.what == "start":
                self._start(action)
        self.removing = [action.number for action in actions if action.what == "remove"]
        return True

    def _processes(self) -> dict[int, EngineProcess]:
        found = dict(self._failed)
        for number in self.rows:
            unit = _unit(number)
            if number not in found and self._units.is_present(unit):
                up, ended = self._units.is_up(unit), self._units.ended(unit)
                found[number] = EngineProcess(self._workers[number], up, ended)
        return found

    def _failure(self, action: EngineAction) -> bool:
        """Return False if a process has died; the caller reports its last lines. Raises JobError otherwise."""
        unit = _unit(action.number)
        if action.number in self._failed or not (self._units.is_present(unit) and self._units.ended(unit)):
            raise JobError(action.why)
        if action.used_up:
            self._units.no_more()
        return False

    def _end(self, actions: Sequence[EngineAction], grace_s: float) -> None:
        """End engines and clear the remains of dead ones, in parallel."""
        following = {action.number: action for action in actions if action.what in ("start", "write")}
        ended = [action for action in actions if action.what in ("end", "clear")]
        for action in ended:
            self._tell(action, following.get(action.number))
        for what, grace in (("clear", 0.0), ("end", grace_s)):
            if units := [_unit(action.number) for action in ended if action.what == what]:
                self._units.end(units, grace)
        for action in ended:
            self._gone(action.number)

    def _gone(self, number: int) -> None:
        self._failed.pop(number, None)
        if self.rows[number].state in (EngineStatus.STARTING, EngineStatus.SERVING):
            self._write(number, "ends")
        self._write(number, "gone")

    def _tell(self, action: EngineAction, then: EngineAction | None) -> None:
        """Log the reason for an engine's end, or the reaction to its death."""
        number, what, event = action.number, action.what, "" if then is None else then.event
        unit, row = _unit(number), self.rows[number]
        if event == "refused":
            log.error("engine %d is left out: %s", number, then.values["refused"] if then else "")
        elif event == "started" and then is not None and then.workers != self._workers.get(number):
            log.log(
                logging.INFO if what == "end" else logging.ERROR,
                "%s has %d workers %s%s",
                unit,
                then.workers,
                f"instead of {self._workers[number]}" if what == "end" else "again: ",
                then.values.get("refused", ""),
            )
        elif event == "started":
            self._units.tell(unit, action.left)
        elif what == "end":
            log.log(self._level, "%s is ended, as ordered", unit)
        elif row.turn is EngineTurn.ASLEEP:
            said = "; ".join(ending(s.process) for s in self._units.members(unit) if failed(s.process))
            log.warning("%s; it is started again at its next turn", said)

    def _start(self, action: EngineAction) -> None:
        number, workers, unit = action.number, action.workers, _unit(action.number)
        self._starts += 1
        self._workers[number] = workers
        try:
            place = self._place(number, workers)
            self._units.give_place(place)
            for s in place:
                assert s.spec is not None
                s.spec.env[START] = str(self._starts)
            self._units.begin(unit)
        except (ConfigError, JobError) as error:
            self._failed[number] = EngineProcess(workers, ended="itself", why=str(error))
            return
        self.places[number, workers] = self._units.members(unit)
        address = next((s.spec.listens for s in place if s.spec is not None and s.spec.listens), "")
        self._write(number, action.event, start=self._starts, url=f"http://{address}", **action.values)
        log.log(self._level, "%s is started (%s)", unit, place[0].process.log)

    def _place(self, number: int, workers: int) -> list[Started]:
        """Return a place for an engine with ``workers`` workers whose GPUs no other engine uses. Engines on these GPUs
        that must change their workers are ended, and start again after this one.

        Raises ConfigError, JobError.
        """
        if (number, workers) not in self.places:
            if self._more is None:
                raise ConfigError("engines of this job keep their places")
            self.places[number, workers] = [self._more.place(number, workers)]
        place = self.places[number, workers]
        needs = _gpus(place)
        for other, process in self._processes().items():
            unit = _unit(other)
            if other != number and self._units.is_present(unit) and needs & _gpus(self._units.members(unit)):
                if not is_unfit(self.rows[other], process):
                    raise JobError(f"another engine has GPUs of the place of {_unit(number)} by now")
                log.info("%s is ended: its GPUs are needed for the other workers of %s", unit, _unit(number))
                self._units.end([unit], self._grace_s)
                self._gone(other)
        return place

    def _write(self, number: int, event: str, **values: object) -> None:
        self.rows = {**self.rows, number: change(self.rows[number], event, **values)}


class RowsInStore:
    """Exchanges a supervisor's rows with the store in a separate thread: an unreachable store delays orders but does
    not block the supervisor.

    Args:
        store: Used only by the thread, which closes it.
        look_s: Seconds between two exchanges.
        beats: Write heartbeats of this program, so that another program's trainer knows that its engines are alive.
    """

    def __init__(self, store: Store, look_s: float, *, beats: bool = False) -> None:
        self._store, self._look_s, self._beats = store, look_s, beats
        self._mine: tuple[Mapping[int, EngineRow], Collection[int]] = ({}, ())
        """(rows to write, numbers of rows to delete)."""
        self._found: Look | None = None
        self._stored: dict[int, EngineRow] = {}
        self._leaving: set[int] = set()
        """Numbers of engines whose node leaves: no order brings them back."""
        self._wake = threading.Event()
        self._is_over = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._follow, daemon=True, name="engine rows").start()

    def exchange(self, engines: EngineSupervisor) -> None:
        """Pass the supervisor's changes to the thread, and apply rows that other processes have written since."""
        found, self._found = self._found, None
        if found is not None:
            engines.take(found)
        mine = (engines.rows, tuple(engines.removing))
        if mine != self._mine:
            self._mine = mine
            self._wake.set()

    def order_away(self, numbers: set[int]) -> None:
        """Order engines to leave, and to stay away; the thread writes the order."""
        self._leaving = self._leaving | numbers
        self._wake.set()

    def close(self) -> None:
        """Ask the thread to end; do not wait for it."""
        self._is_over = True
        self._wake.set()

    def _follow(self) -> None:
        while not self._is_over:
            try:
                self._found = self.look()
            except (JobError, ConfigError, SQLAlchemyError) as error:  # other components report it
                log.debug("rows of engines: %s", error)
            self._wake.wait(self._look_s)
            self._wake.clear()
        self._store.close()

    def look(self) -> Look:
        """Write the supervisor's changes, and read rows that other processes have written."""
        if self._beats:
            self._store.workers.beat(self._store.program)
        rows, removing = self._mine
        changed = [row for row in rows.values() if self._differs(row)]
        if changed:
            self._store.engines.note(changed)
        removed = [number for number in removing if number in self._stored and self._store.engines.remove(number)]
        found = self._store.engines.own()
        if any(row.wanted and row.number in self._leaving for row in found):
            self._store.engines.order_away(self._leaving)
            found = self._store.engines.own()
        self._stored = {row.number: row for row in found}
        return Look(found, removed, self._store.journal.last_step())

    def _differs(self, row: EngineRow) -> bool:
        stored = self._stored.get(row.number)
        columns = COLUMNS[ColumnOwner.SUPERVISOR]
        return stored is not None and any(getattr(stored, name) != getattr(row, name) for name in columns)


def _unit(number: int) -> str:
    return ProcessKind.ENGINE.named(number)


def _gpus(place: Sequence[Started]) -> set[tuple[int, int]]:
    """Return (rank of the node, GPU number) of each GPU."""
    return {(s.node.rank, gpu) for s in place if s.spec is not None for gpu in s.spec.gpus}
