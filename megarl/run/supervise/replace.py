"""Engines, the explorer and reward hosts of an attempt that have died are started again, while the trainer waits for
them."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence

from megarl.core.errors import JobError
from megarl.core.jobs import ProcessKind, kind_of, unit_of
from megarl.explore.store import EngineStatus
from megarl.run.nodes.node import NotStarted, Process, Started, on_every_node
from megarl.run.process.process import ERROR

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""A peer often fails because another died first: the first cause gets a moment to show."""
LOOK_S = 1.0
"""Seconds between two checks that servers listen."""
CONNECT_S = 0.3
LOOK_AGAIN_S = 0.05
CLOSED_S = 5.0
"""Seconds that a server may live on that listens no more: vLLM's waits forever for its last answers when a worker has
died."""
SERVERS = frozenset({ProcessKind.ENGINE, ProcessKind.REWARD_HOST})
"""Kinds that never end by themselves."""
DECIDING = frozenset({ProcessKind.TRAINER, ProcessKind.BENCH})
"""Kinds whose death ends the attempt."""
FREE_S = 10.0
"""Seconds that children of a dead server may hold its port, before its successor is given up."""


class Replacements:
    """Replaces what has died of ``started``, in place, at most ``left`` times before it is refilled.

    Not a trainer rank, nothing on a lost node, and nothing whose successor would fail alike: an engine or a reward host
    that ended by itself before it ever listened, an explorer that logged why it cannot go on (status 1). Those stay
    dead, for ``watch`` to report.
    """

    def __init__(self, started: list[Started], left: int) -> None:
        self._started = started
        self._all = self._left = left
        self._added: set[str] = set()
        """Engines that came by order: the job goes on without one that does not start."""
        self._served: set[str] = set()
        """Added engines that have served: one may be the last engine of the job."""
        self._given_up: list[str] = []
        self._replaced: Counter[str] = Counter()
        self._up: set[str] = set()
        """Units that have listened."""
        self._closed: dict[str, float] = {}
        """Since when they do not any more."""
        self._looked_at = 0.0
        self._absent = {unit_of(s.process.name) for s in started if isinstance(s.process, NotStarted)}
        """Units without processes, by order."""
        self._asleep: set[str] = set()
        """Units that are not started again when they die, until they are wanted."""
        self.used_up = ""
        """Reason why a dead process was not replaced, where it could have been."""

    def replace_dead(self) -> bool:
        """Return True if all that had died was replaced, what dies meanwhile left to the next call. Raises JobError
        when one cannot be started again."""
        self._look()
        if not self._dead():
            return True
        time.sleep(SETTLE_S)
        units = list(dict.fromkeys(unit_of(s.process.name) for s in self._dead()))
        for unit in [unit for unit in units if not self._replaceable(unit) and self._is_spared(unit)]:
            log.error("%s", "; ".join(ending(s.process) for s in self._members(unit)))
            self.end([unit], 0.0)
            self._given_up.append(unit)
            units.remove(unit)
        if not all(self._replaceable(unit) for unit in units):
            return False
        if len(units) > self._left:
            self.used_up = self._what_they_were_used_for()
            return False
        for unit in units:
            self._replace(unit)
        return True

    def refill(self) -> None:
        """Have all replacements again: a step was made."""
        if self._left < self._all:
            self._left = self._all
            self._replaced.clear()

    def take_given_up(self) -> list[str]:
        """Return engines that were added and have ended before they served, once."""
        taken, self._given_up = self._given_up, []
        return taken

    def knows(self, unit: str) -> bool:
        """Return True if the unit has a place, be it absent."""
        return any(True for _ in self._members(unit))

    def add(self, started: Started, *, again: bool = False) -> None:
        """Take a unit in that is absent until ``begin``, in the place of one that has ended; ``again``: it has served
        there before."""
        unit = unit_of(started.process.name)
        self._started[:] = [*(s for s in self._started if unit_of(s.process.name) != unit), started]
        self._absent.add(unit)
        self._added.add(unit)
        (self._served.add if again else self._served.discard)(unit)

    def of(self, unit: str) -> Started:
        """Return a unit of one process."""
        [started] = self._members(unit)
        return started

    def _what_they_were_used_for(self) -> str:
        used = ", ".join(f"{unit} {count}x" for unit, count in self._replaced.items())
        left = f", {self._left} left" if self._left else " used up" if self._all else ""
        return (
            f"not started again: cluster.replacements={self._all}{left}{f' ({used})' if used else ''}; "
            "fix the cause in its log, raise cluster.replacements, or have cluster.restarts start the job again from "
            "its newest checkpoint"
        )

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = now = time.monotonic()
        for s in self.present():
            if s.spec is None or not s.spec.listens or s.process.poll() is not None:
                continue
            listens, unit = _listens(s.spec.listens), unit_of(s.process.name)
            if listens and unit not in self._up:
                self._up.add(unit)
                self._served.add(unit)
                for member in self._members(unit):
                    member.node.note(member.process.name)
            if listens is not False or unit not in self._up:
                self._closed.pop(unit, None)
            elif now - self._closed.setdefault(unit, now) > CLOSED_S:
                self._closed[unit] = now
                log.error(
                    "%s lives but listens at %s no more (%s); killing it", s.process.name, s.spec.listens, s.process.log
                )
                s.process.signal(signal.SIGKILL)

    def _dead(self) -> list[Started]:
        return [s for s in self.present() if failed(s.process)]

    def present(self) -> list[Started]:
        """Processes that are not absent by order."""
        return [s for s in self._started if unit_of(s.process.name) not in self._absent]

    def state(self, unit: str) -> EngineStatus:
        """State of an engine, as the last look at its port found it."""
        if unit in self._absent or not self.knows(unit):
            return EngineStatus.ABSENT
        if unit in self._asleep:
            return EngineStatus.ASLEEP
        return EngineStatus.SERVING if unit in self._up else EngineStatus.STARTING

    def let_sleep(self, unit: str, asleep: bool) -> None:
        """Start a unit that dies again at once, or, while it is ``asleep``, when ``begin`` asks for it."""
        (self._asleep.add if asleep else self._asleep.discard)(unit)

    def end(self, units: Sequence[str], grace_s: float) -> None:
        """End all parts of units, at once; until ``begin`` they are absent."""
        for unit in units:
            self._absent.add(unit)
            self._forget(unit)
        members = [s for unit in units for s in self._members(unit)]
        on_every_node(members, lambda node, names: node.stop(names, grace_s))

    def begin(self, unit: str) -> None:
        """Start a unit that was absent. Raises JobError where it cannot be started."""
        self._start(unit)
        self._absent.discard(unit)

    def _members(self, unit: str) -> list[Started]:
        return [s for s in self._started if unit_of(s.process.name) == unit]

    def _replaceable(self, unit: str) -> bool:
        members = self._members(unit)
        if kind_of(unit) in DECIDING or any(s.spec is None or s.node.fault() is not None for s in members):
            return False
        return unit in self._up or any(_by_signal(s.process) for s in members)

    def _is_spared(self, unit: str) -> bool:
        """True for an engine that came by order and that the job can do without: it has not served yet, or another
        engine is there."""
        engines = {unit_of(s.process.name) for s in self.present() if kind_of(s.process.name) is ProcessKind.ENGINE}
        dead = {unit_of(s.process.name) for s in self._dead()}
        others = any(other not in dead or self._replaceable(other) for other in engines - {unit})
        return unit in self._added and (others or unit not in self._served)

    def _replace(self, unit: str) -> None:
        """All parts of an engine that spans nodes, once nothing of it is left: what a server forked holds its port as
        well."""
        members = self._members(unit)
        self._left -= 1
        self._replaced[unit] += 1
        for s in members:
            if failed(s.process):
                left = f"cluster.replacements: {self._left} left"
                log.error(
                    "%s, its last word %r (%s); starting it again (%s)",
                    ending(s.process),
                    _cause(s.process),
                    s.process.log,
                    left,
                )
        self._forget(unit)
        for s in members:
            s.node.stop([s.process.name], 0.0)
        if unit in self._asleep:
            self._absent.add(unit)
        else:
            self._start(unit)

    def _forget(self, unit: str) -> None:
        self._up.discard(unit)
        self._closed.pop(unit, None)

    def _start(self, unit: str) -> None:
        members = self._members(unit)
        for s in members:
            assert s.spec is not None
            _until_free(s.process.name, s.spec.listens)
        for s in members:
            assert s.spec is not None
            self._started[self._started.index(s)] = s._replace(process=s.node.start(s.spec))


def lacks_gpus(replacements: Replacements, unit: str) -> bool:
    """Return True for an absent engine of one process if another engine has a GPU of its place. Trainer ranks on its
    GPUs take turns with it."""
    if not replacements.knows(unit) or replacements.state(unit) is not EngineStatus.ABSENT:
        return False
    engines = [s for s in replacements.present() if kind_of(s.process.name) is ProcessKind.ENGINE]
    spec, there = replacements.of(unit).spec, (s.spec for s in engines)
    return spec is not None and any(set(spec.gpus) & set(other.gpus) for other in there if other is not None)


def _listens(address: str) -> bool | None:
    """None when that is unknown: a machine that is busy answers late."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _until_free(name: str, address: str) -> None:
    """Wait until nobody listens there: whoever does would be taken for the successor.

    Raises:
        JobError: somebody does after FREE_S.
    """
    deadline = time.monotonic() + FREE_S
    while address and (listens := _listens(address)) is not False:
        if time.monotonic() > deadline:
            if listens is None:  # unknown: the successor itself will find out
                return
            raise JobError(
                f"{name} cannot be started again: somebody else listens at {address}, {FREE_S:g} s after it was ended"
            )
        time.sleep(LOOK_AGAIN_S)


def failed(process: Process) -> bool:
    """True if it has ended and should not have: an explorer ends with 0 when the trainer has closed the job, an engine
    or a reward host never."""
    status = process.poll()
    return status is not None and (status != 0 or kind_of(process.name) in SERVERS)


def ending(process: Process) -> str:
    status = process.poll()
    how = f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    return f"{process.name} {how}"


def _by_signal(process: Process) -> bool:
    """128 plus the signal's number is the status of processes that end in order when one comes."""
    status = process.poll()
    return status is not None and (status < 0 or status > 128)


def _cause(process: Process) -> str:
    lines: Sequence[str] = process.tail().splitlines() or [""]
    return next((line for line in lines if ERROR.search(line)), lines[-1]).strip()
