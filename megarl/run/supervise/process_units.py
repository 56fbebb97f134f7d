"""Processes of an attempt by unit: their state, start and end."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Sequence

from megarl.core.errors import JobError
from megarl.core.jobs import ProcessKind, kind_of, unit_of
from megarl.engines.fleet import Replacements
from megarl.run.nodes.node import NotStarted, Process, Started, on_every_node
from megarl.run.process.process import ERROR

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""Seconds after a death before it is reported: a peer often fails because another process died first."""
LOOK_S = 1.0
"""Seconds between two checks that servers listen."""
CONNECT_S = 0.3
LOOK_AGAIN_S = 0.05
CLOSED_S = 5.0
"""Seconds that a server may live after it stops listening: vLLM's server waits forever for its last responses if a
worker died."""
SERVERS = frozenset({ProcessKind.ENGINE, ProcessKind.REWARD_HOST})
"""Kinds that must never end by themselves."""
DECIDING = frozenset({ProcessKind.TRAINER, ProcessKind.BENCH})
"""Kinds whose death ends the attempt."""
FREE_S = 10.0
"""Seconds that children of a dead server may hold its port before a restart fails."""


class Units:
    """Processes of an attempt by unit: an engine with all its parts, or any other process by itself.

    Starts and ends units, and detects which listen or have died. A dead explorer or reward host is replaced in place;
    ``EngineSupervisor`` decides about engines. Trainer ranks, processes of a lost node, and processes that would fail
    again are not replaced: a reward host that ended by itself before it listened, an explorer that logged a fatal error
    (status 1). They stay dead, and ``watch`` reports them.
    """

    def __init__(self, started: list[Started], replacements: Replacements) -> None:
        self._started = started
        self._replacements = replacements
        self._up: set[str] = set()
        """Units that have listened."""
        self._closed: dict[str, float] = {}
        """Time since which a unit no longer listens."""
        self._looked_at = 0.0
        self.absent = {unit_of(s.process.name) for s in started if isinstance(s.process, NotStarted)}
        """Units that must have no process: ended by order, or not started yet."""
        self.used_up = ""
        """Reason why a replaceable dead process was not replaced."""

    def look(self) -> bool:
        """Check which servers listen, and kill running ones that stopped listening. Return False if a process has died,
        after a delay in which its cause may show."""
        self._look()
        if not self._dead():
            return True
        time.sleep(SETTLE_S)
        return False

    def replace_others(self) -> bool:
        """Replace dead processes other than engines; return False if one is not replaceable. Raises JobError if a
        restart fails."""
        # An engine that failed to restart has no row.
        dead = [s for s in self._dead() if s.spec is None or not is_engine(s.process.name)]
        units = list(dict.fromkeys(unit_of(s.process.name) for s in dead))
        if not all(map(self._is_replaceable, units)):
            return False
        for unit in units:
            if not self._replacements.take(unit):
                self.no_more()
                return False
            self.tell(unit, self._replacements.left)
            self.end([unit], 0.0)
            self.begin(unit)
        return True

    def no_more(self) -> None:
        """Record that a unit is not replaced because the replacements are used up."""
        of = self._replacements
        used = ", ".join(f"{unit} {count}x" for unit, count in of.used.items())
        self.used_up = (
            f"not started again: cluster.replacements={of.all}{' used up' if of.all else ''}"
            f"{f' ({used})' if used else ''}; fix the cause in its log, raise cluster.replacements, or have "
            "cluster.restarts start the job again from its newest checkpoint"
        )

    def members(self, unit: str) -> list[Started]:
        """Return the processes of a unit; [] if it has no place."""
        return [s for s in self._started if unit_of(s.process.name) == unit]

    def present(self) -> list[Started]:
        """Return the processes of all units that are not absent."""
        return [s for s in self._started if unit_of(s.process.name) not in self.absent]

    def is_present(self, unit: str) -> bool:
        """Return True if the unit exists and is not absent."""
        return unit not in self.absent and bool(self.members(unit))

    def is_up(self, unit: str) -> bool:
        """Return True if the unit has listened since its last start."""
        return unit in self._up

    def ended(self, unit: str) -> str:
        """Return how a unit has ended: "signal", "itself", or "node" if its node cannot restart it; "" while it
        lives."""
        dead = [s for s in self.members(unit) if failed(s.process)]
        if not dead:
            return ""
        if any(s.spec is None or s.node.fault() is not None for s in self.members(unit)):
            return "node"
        return "signal" if any(_by_signal(s.process) for s in dead) else "itself"

    def tell(self, unit: str, left: int) -> None:
        """Log how a unit ended that will be restarted, with the replacements that are left."""
        for s in self.members(unit):
            if failed(s.process):
                log.error(
                    "%s, its last word %r (%s); starting it again (cluster.replacements: %d left)",
                    ending(s.process),
                    _cause(s.process),
                    s.process.log,
                    left,
                )

    def end(self, units: Sequence[str], grace_s: float) -> None:
        """End all parts of units in parallel, and remove the remains of dead ones; the units are absent until
        ``begin``."""
        for unit in units:
            self.absent.add(unit)
            self._up.discard(unit)
            self._closed.pop(unit, None)
        members = [s for unit in units for s in self.members(unit)]
        on_every_node(members, lambda node, names: node.stop(names, grace_s))

    def give_place(self, members: Sequence[Started]) -> None:
        """Assign this place to an absent unit."""
        unit = unit_of(members[0].process.name)
        self._started[:] = [*(s for s in self._started if unit_of(s.process.name) != unit), *members]
        self.absent.add(unit)

    def begin(self, unit: str) -> None:
        """Start an absent unit, once its port is free of earlier processes. Raises JobError if it cannot be started."""
        members = self.members(unit)
        for s in members:
            assert s.spec is not None
            _until_free(s.process.name, s.spec.listens)
        for s in members:
            assert s.spec is not None
            self._started[self._started.index(s)] = s._replace(process=s.node.start(s.spec))
        self.absent.discard(unit)

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = now = time.monotonic()
        for s in self.present():
            if s.spec is None or not s.spec.listens or s.process.poll() is not None:
                continue
            listens, unit = is_listening(s.spec.listens), unit_of(s.process.name)
            if listens and unit not in self._up:
                self._up.add(unit)
                for member in self.members(unit):
                    member.node.note(member.process.name)
            if listens is not False or unit not in self._up:
                self._closed.pop(unit, None)
            elif now - self._closed.setdefault(unit, now) > CLOSED_S:
                self._closed[unit] = now
                log.error(
                    "%s is alive but no longer listens at %s (%s); killing it",
                    s.process.name,
                    s.spec.listens,
                    s.process.log,
                )
                s.process.signal(signal.SIGKILL)

    def _dead(self) -> list[Started]:
        return [s for s in self.present() if failed(s.process)]

    def _is_replaceable(self, unit: str) -> bool:
        how = self.ended(unit)
        return kind_of(unit) not in DECIDING and how != "node" and (unit in self._up or how == "signal")


def is_engine(name: str) -> bool:
    """Return True for the name of an engine's process or unit."""
    return kind_of(name) is ProcessKind.ENGINE


def is_listening(address: str) -> bool | None:
    """Return True if a process listens at the address; None if unknown: a busy machine answers late."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _until_free(name: str, address: str) -> None:
    """Wait until no process listens at the address: it would be taken for the restarted server.

    Raises:
        JobError: a process still listens after FREE_S.
    """
    deadline = time.monotonic() + FREE_S
    while address and (listens := is_listening(address)) is not False:
        if time.monotonic() > deadline:
            if listens is None:  # unknown: the restarted server will find out
                return
            raise JobError(
                f"{name} cannot be started again: somebody else listens at {address}, {FREE_S:g} s after it was ended"
            )
        time.sleep(LOOK_AGAIN_S)


def failed(process: Process) -> bool:
    """Return True if the process ended unexpectedly. An explorer ends with 0 when the trainer has closed the job;
    engines and reward hosts never end."""
    status = process.poll()
    return status is not None and (status != 0 or kind_of(process.name) in SERVERS)


def ending(process: Process) -> str:
    status = process.poll()
    how = f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    return f"{process.name} {how}"


def _by_signal(process: Process) -> bool:
    """Return True if a signal ended the process: status 128 + number is an orderly end after a signal."""
    status = process.poll()
    return status is not None and (status < 0 or status > 128)


def _cause(process: Process) -> str:
    lines: Sequence[str] = process.tail().splitlines() or [""]
    return next((line for line in lines if ERROR.search(line)), lines[-1]).strip()
