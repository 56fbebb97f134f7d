"""Kinds of faults that are done to a job on two nodes at random moments, and their order, drawn from a seed.

Missing: packets lost at random (the kernel here has no ``netem``: a queue that is too short drops them instead), and
blocks that a disk damages (``tests/system/injected.py`` damages files).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from megarl.core.processes.machine import group_members, start_ticks
from tests.system.chaos_ground import (
    ENGINE,
    EXPLORER,
    NODES,
    REAPER,
    REWARDS,
    SILENT_S,
    STALL_S,
    TRAINER,
    ChaosError,
    ChaosJob,
    send,
    words,
)
from tests.system.jobs import parent_of

HURRIED = 0.2
"""Share of faults that do not wait for a step after the one before."""


class Absent(Exception):
    """Nothing to do this fault to is there."""


class Drawn(NamedTuple):
    """A fault of a seed: kind, and numbers in [0, 1) for everything else that is random about it."""

    kind: str
    gap: float
    pick: float
    length: float
    hurried: bool


def drawn(seed: str) -> Iterator[Drawn]:
    """Yield the faults of a seed without end: all kinds in random order, again and again."""
    dice = random.Random(seed)
    while True:
        for kind in dice.sample(sorted(KINDS), len(KINDS)):
            yield Drawn(kind, dice.random(), dice.random(), dice.random(), dice.random() < HURRIED)


def between(drawn: Drawn, least: float, most: float) -> float:
    """Return seconds of the fault."""
    return least + drawn.length * (most - least)


def _chosen(pids: Sequence[int], drawn: Drawn) -> int:
    if not pids:
        raise Absent
    return sorted(pids)[int(drawn.pick * len(pids))]


def named(command: str) -> str:
    """Return what a command line runs."""
    if "tests.system.inside" in command:
        return "the command"
    return " ".join(command.partition(" -m ")[2].split()[:2]) or command[:LINE]


def _node_of(drawn: Drawn) -> int:
    return int(drawn.pick * len(NODES))


def _kill(find: Callable[[ChaosJob], Sequence[int]]) -> Kind:
    def do(job: ChaosJob, drawn: Drawn) -> str:
        pid = _chosen(find(job), drawn)
        node, text = job.processes().get(pid), words(pid)
        send(pid, signal.SIGKILL)
        return f"node {node}: {named(text)}"

    return do


def _trainers(job: ChaosJob) -> list[int]:
    return job.of(TRAINER)


def _engines(job: ChaosJob) -> list[int]:
    """Return the servers, which lead their sessions."""
    return [pid for pid in job.of(ENGINE) if _session(pid) == pid]


def _engine_workers(job: ChaosJob) -> list[int]:
    return [pid for server in _engines(job) for pid in group_members(server) if pid != server]


def _explorers(job: ChaosJob) -> list[int]:
    return job.of(EXPLORER)


def _reward_workers(job: ChaosJob) -> list[int]:
    return job.of("megarl.rewards.pool.worker")


def _checkpoint_writers(job: ChaosJob) -> list[int]:
    """Return the forks of trainer ranks."""
    ranks = set(job.of(TRAINER))
    return [pid for pid in job.processes() if parent_of(pid) in ranks and TRAINER in words(pid)]


def _fork_servers(job: ChaosJob) -> list[int]:
    return [pid for pid in job.processes() if "megarl.core.processes.fork" in words(pid)]


def _reward_hosts(job: ChaosJob) -> list[int]:
    return job.of(REWARDS)


def _reapers(job: ChaosJob) -> list[int]:
    return job.of(REAPER)


def _commands(job: ChaosJob) -> list[int]:
    return job.commands


def _database(job: ChaosJob) -> list[int]:
    """Return the first process of the job's PostgreSQL."""
    return [pid for pid in job.processes() if f"-D {job.run_dir}" in words(pid) and "--single" not in words(pid)]


def _anything(job: ChaosJob) -> list[int]:
    trained = (_trainers, _checkpoint_writers, _engines, _engine_workers, _explorers)
    others = (_reward_hosts, _reward_workers, _commands, _reapers, _fork_servers, _database)
    return [pid for find in (*trained, *others) for pid in find(job)]


def _node_killed(job: ChaosJob, drawn: Drawn) -> str:
    node = _node_of(drawn)
    for pid in [pid for pid, of in job.processes().items() if of == node]:
        send(pid, signal.SIGKILL)
    return f"node {node}"


def _job_killed(job: ChaosJob, drawn: Drawn) -> str:
    for pid in [*job.commands, *job.processes()]:
        send(pid, signal.SIGKILL)
    return "both nodes"


def _preempted(job: ChaosJob, drawn: Drawn) -> str:
    """SIGTERM to the commands, then both are given again after a while (``ChaosJob.go_on``)."""
    for pid in job.commands:
        send(pid, signal.SIGTERM)
    job.until_ended("a preemption")
    seconds = between(drawn, 0, 5)
    time.sleep(seconds)
    return f"again after {seconds:.0f} s"


def _stopped(least: float, most: float) -> Kind:
    def do(job: ChaosJob, drawn: Drawn) -> str:
        pid = _chosen(_anything(job), drawn)
        node, text = job.processes().get(pid), words(pid)
        seconds = between(drawn, least, most)
        _hold([pid], seconds)
        return f"{seconds:.0f} s, node {node}: {named(text)}"

    return do


def _hold(pids: Sequence[int], seconds: float) -> None:
    """Stop processes for a while."""
    begun = {pid: start_ticks(pid) for pid in pids}
    for pid in pids:
        send(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        if start_ticks(pid) == begun[pid]:
            send(pid, signal.SIGCONT)


def _database_hangs(job: ChaosJob, drawn: Drawn) -> str:
    first = _chosen(_database(job), drawn)
    seconds = between(drawn, 2, STALL_S + 15)
    _hold([first, *(pid for pid in job.processes() if parent_of(pid) == first)], seconds)
    return f"{seconds:.0f} s"


def _database_ended(job: ChaosJob, drawn: Drawn) -> str:
    send(_chosen(_database(job), drawn), signal.SIGINT)
    return "in order"


def _disk_full(job: ChaosJob, drawn: Drawn) -> str:
    if not job.run_dir.is_mount():
        raise ChaosError(f"{job.run_dir} is no disk of its own")
    ballast, seconds = job.run_dir / "ballast", between(drawn, 2, 20)
    size, chunk, end = 0, 1 << 28, time.monotonic() + seconds
    with ballast.open("wb") as file:
        while time.monotonic() < end:  # also what the job frees
            try:
                os.posix_fallocate(file.fileno(), size, chunk)
                size += chunk
            except OSError:
                chunk = max(chunk // 2, 1 << 12)
                time.sleep(0.0 if chunk > 1 << 12 else 0.05)
    ballast.unlink()
    return f"{seconds:.0f} s"


def _disk_slow(job: ChaosJob, drawn: Drawn) -> str:
    seconds, milliseconds = between(drawn, 5, 20), 10 + 190 * drawn.pick
    for shim in job.ground.shims:
        shim.slow(milliseconds, job.run_dir)
    time.sleep(seconds)
    for shim in job.ground.shims:
        shim.slow(0, job.run_dir)
    return f"{seconds:.0f} s, {milliseconds:.0f} ms a write"


def _messages_dropped(job: ChaosJob, drawn: Drawn) -> str:
    node, seconds = NODES[_node_of(drawn)], between(drawn, 3, 20)
    job.ground.networks.drop(node, kilobits=400)
    time.sleep(seconds)
    job.ground.networks.keep(node)
    return f"{seconds:.0f} s, to {node}"


def _cut_off(least: float, most: float) -> Kind:
    def do(job: ChaosJob, drawn: Drawn) -> str:
        seconds = between(drawn, least, most)
        job.ground.networks.cut(NODES[1])
        time.sleep(seconds)
        job.ground.networks.join(NODES[1])
        return f"{seconds:.0f} s"

    return do


def _clock_jumps(job: ChaosJob, drawn: Drawn) -> str:
    """Forward or back, by up to an hour, on one node; then to the right time again."""
    node, seconds = _node_of(drawn), between(drawn, 2, 15)
    by = round((-1 if drawn.gap < 0.5 else 1) * 3600 ** (2 * drawn.pick % 1.0), 1)
    job.ground.shims[node].jump(by)
    time.sleep(seconds)
    job.ground.shims[node].jump(0)
    return f"node {node}: {by:+.1f} s, back after {seconds:.0f} s"


def _session(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


LINE = 40
"""Most characters of a command line in the account."""
Kind = Callable[[ChaosJob, Drawn], str]
"""Does it, waits until it is over, and returns its details. Raises Absent."""
KINDS: Mapping[str, Kind] = {
    "trainer rank: SIGKILL": _kill(_trainers),
    "engine's server: SIGKILL": _kill(_engines),
    "engine's worker: SIGKILL": _kill(_engine_workers),
    "explorer: SIGKILL": _kill(_explorers),
    "reward worker: SIGKILL": _kill(_reward_workers),
    "reward host: SIGKILL": _kill(_reward_hosts),
    "writer of checkpoints: SIGKILL": _kill(_checkpoint_writers),
    "fork server: SIGKILL": _kill(_fork_servers),
    "reaper: SIGKILL": _kill(_reapers),
    "a node's command: SIGKILL": _kill(_commands),
    "all of a node: SIGKILL": _node_killed,
    "all of the job: SIGKILL": _job_killed,
    "preemption: SIGTERM to both commands": _preempted,
    "a process: SIGSTOP for up to 10 s": _stopped(1, 10),
    f"a process: SIGSTOP for longer than stall_s={STALL_S:.0f}": _stopped(STALL_S + 5, STALL_S + 20),
    "disk full": _disk_full,
    "disk slow": _disk_slow,
    "messages to a node dropped": _messages_dropped,
    "a node cut off for up to 8 s": _cut_off(0.5, 8),
    f"a node cut off for longer than heartbeat_s={SILENT_S:.0f}": _cut_off(SILENT_S + 5, SILENT_S + 20),
    "database: SIGKILL": _kill(_database),
    "database: stopped in order": _database_ended,
    "database: SIGSTOP": _database_hangs,
    "clock of a node jumps": _clock_jumps,
}
