"""Detects that a job makes no progress although all its processes live; reports their locations, and kills the process
that the others wait for."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.config import Config
from megarl.core.errors import JobError
from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.processes.heartbeat import START
from megarl.run.nodes.node import Process, Started, on_every_node
from megarl.run.process import stacks
from megarl.run.process.stacks import STOPPED, Account, ProcessHeartbeat, ProcessSnapshot

log = logging.getLogger(__name__)

LOOK_S = 1.0
WAITING = ("rollout", "evaluation")
"""Phases in which trainer ranks or a bench wait for the explorer."""
ASKING = (ProcessKind.TRAINER.named(0), ProcessKind.BENCH.named(0))
"""Processes that ask for rollouts."""


@dataclass
class _Seen:
    """State of a process at the last look."""

    heartbeat: ProcessHeartbeat
    silent_s: float = 0.0
    """Seconds since its last progress mark, while this process ran, scaled by ``_pace``."""


class Watchdog:
    """Watchdog of one attempt. It writes stacks to ``stall_<k>.txt`` in ``logs``.

    Trainer ranks wait for each other, so they stall together: while one makes progress, none is killed, unless a signal
    has stopped one. A silent process of another kind is killed by itself.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        self._config = config
        self._stall_s = config.cluster.stall_s
        self._every_s = min(LOOK_S, self._stall_s / 5)
        self._logs = logs
        self._looked = time.monotonic()
        self._seen: dict[Process, _Seen] = {}
        self._work = -1
        self._idle_s = 0.0
        """Seconds that the trainer has waited without a finished sample while the engines generated nothing."""

    def look(self, started: Sequence[Started]) -> None:
        """Check for stalls. Call it often; it works at most once a second.

        Raises:
            JobError: the trainer ranks or their rollout stall: location of each process. The trainer ranks are killed.
        """
        now = time.monotonic()
        passed, alive = now - self._looked, [s for s in started if s.process.poll() is None]
        if passed < self._every_s:
            return
        self._looked = now
        # Limit the time after the whole job was suspended (scontrol suspend): this process saw no silence then.
        passed = min(passed, 2 * self._every_s)
        heartbeats = {s.process: s.process.heartbeat() for s in alive}
        trainers = [process for process in heartbeats if kind_of(process.name) is ProcessKind.TRAINER]
        syncing = any(heartbeats[process].timeout_s for process in trainers)
        self._seen = {
            p: self._glance(p, heartbeat, passed * self._pace(p, heartbeat, syncing))
            for p, heartbeat in heartbeats.items()
        }
        late = {process for process in self._seen if self._seen[process].silent_s > self._limit(process)}
        helpers = late.difference(trainers)
        if self._stalled(trainers, late):  # a stopped process is to blame, even before its timeout
            helpers |= {process for process in self._seen if self._is_stopped(process) and process not in trainers}
        if helpers:
            self._end(helpers, alive)
        elif self._stalled(trainers, late):
            still = [process for process in trainers if process in late]
            who = "no trainer rank has" if still == trainers else f"{', '.join(p.name for p in still)} has not"
            silent_s = max(self._seen[process].silent_s for process in still)
            self._give_up(f"{who} moved for {silent_s:.0f} s (cluster.stall_s={self._stall_s:g})", alive)
        elif (idle := self._idle(passed)) is not None:
            self._give_up(idle, alive)

    def _pace(self, process: Process, heartbeat: ProcessHeartbeat, syncing: bool) -> float:
        """Return the share of a process's timeout that one second uses up. An engine may be silent while its workers
        receive weights."""
        if not syncing or kind_of(process.name) is not ProcessKind.ENGINE or heartbeat.state == STOPPED:
            return 1.0
        return self._stall_s / max(self._stall_s, self._config.sync.timeout_s)

    def _glance(self, process: Process, heartbeat: ProcessHeartbeat, passed: float) -> _Seen:
        before = self._seen.get(process)
        moved = before is None or before.heartbeat.beats != heartbeat.beats
        return _Seen(heartbeat, 0.0 if moved or before is None else before.silent_s + passed)

    def _limit(self, process: Process) -> float:
        heartbeat, config = self._seen[process].heartbeat, self._config
        if heartbeat.state == STOPPED:
            return self._stall_s
        if heartbeat.phase == START:
            return max(self._stall_s, config.rollout.start_timeout_s)
        return max(self._stall_s, heartbeat.timeout_s)

    def _is_stopped(self, process: Process) -> bool:
        return self._seen[process].heartbeat.state == STOPPED

    def _stalled(self, trainers: Sequence[Process], late: set[Process]) -> bool:
        return bool(trainers) and (
            late.issuperset(trainers) or any(p in late and self._is_stopped(p) for p in trainers)
        )

    def _idle(self, passed: float) -> str | None:
        """Return a report if the rollout has stalled for too long; None otherwise."""
        waiting = any(s.heartbeat.phase in WAITING for p, s in self._seen.items() if p.name in ASKING)
        explorers = [s.heartbeat for p, s in self._seen.items() if kind_of(p.name) is ProcessKind.EXPLORER]
        work = sum(heartbeat.work for heartbeat in explorers)
        self._idle_s = self._idle_s + passed if waiting and explorers and work == self._work else 0.0
        self._work = work
        # The explorer reports an engine that generates nothing for request_timeout_s.
        if self._idle_s <= self._stall_s + self._config.rollout.request_timeout_s:
            return None
        return (
            "the job waits for a rollout: no sample has ended and no token was generated for "
            f"{self._idle_s:.0f} s (cluster.stall_s={self._stall_s:g} beyond "
            f"rollout.request_timeout_s={self._config.rollout.request_timeout_s:g}); the explorer: {explorers[0].phase}"
        )

    def _end(self, helpers: set[Process], alive: Sequence[Started]) -> None:
        """Kill silent processes, so that the stall becomes a death."""
        names = ", ".join(sorted(p.name for p in helpers))
        log.error(
            "%s",
            self._account(f"{names} gave no heartbeat (cluster.stall_s={self._stall_s:g}) and will be killed", alive),
        )
        for process in helpers:
            process.signal(signal.SIGKILL)
        self._seen.clear()  # processes that waited for them get their full timeout again

    def _give_up(self, what: str, alive: Sequence[Started]) -> None:
        text = self._account(what, alive)
        for s in alive:
            if kind_of(s.process.name) is ProcessKind.TRAINER:  # blocked ranks would use up the others' grace
                s.process.signal(signal.SIGKILL)
        raise JobError(text)

    def _account(self, what: str, alive: Sequence[Started]) -> str:
        accounts = _accounts(alive)
        rows = [
            ProcessSnapshot(
                p.name,
                s.heartbeat.phase,
                s.heartbeat.step,
                s.silent_s,
                accounts.get(p.name, Account(s.heartbeat.state, "", 0, "")),
            )
            for p, s in self._seen.items()
        ]
        text = f"{stacks.table(rows)}\n{stacks.verdict(rows)}"
        path = self._write(
            f"{what}\n{text}\n\n" + "\n".join(f"--- {r.name}\n{r.account.stacks or 'no stacks'}" for r in rows)
        )
        return f"{what}; {path}\n{text}"

    def _write(self, text: str) -> str:
        for k in range(1, 1000):
            path = self._logs / f"stall_{k}.txt"
            with suppress(FileExistsError):
                try:
                    self._logs.mkdir(parents=True, exist_ok=True)
                    with path.open("x") as file:
                        file.write(text)
                    return f"stacks of all processes: {path}"
                except FileExistsError:
                    raise
                except OSError as error:  # e.g. a full disk
                    return f"stacks of all processes cannot be written to {path} ({error})"
        return "stacks are in none of a thousand files"


def _accounts(alive: Sequence[Started]) -> dict[str, Account]:
    """Return the accounts of all processes, by name; nodes work in parallel."""
    found = on_every_node(alive, lambda node, names: node.accounts(names))
    return {name: account for node in found for name, account in node.items()}
