"""Interface of a job's node for the head, and its implementation for this machine. ``remote.py`` has the other
nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from megarl.core.errors import JobError
from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.processes.machine import group_members
from megarl.engines.client.auth import KEY_VARIABLE
from megarl.engines.client.leftovers import own_folder, record_segments, shared_memory
from megarl.run.nodes import gpu_state
from megarl.run.nodes.allocation import Role
from megarl.run.process import ports, stacks
from megarl.run.process.forkserver import ForkServers
from megarl.run.process.liveness import Probe
from megarl.run.process.process import Child
from megarl.run.process.reaper import Reaper
from megarl.run.process.stacks import Account, ProcessHeartbeat

T = TypeVar("T")
GONE_S = 20.0
"""Seconds to wait for a killed process: it frees all its memory before it ends."""


@dataclass(frozen=True)
class Spec:
    """A process to start: this Python with ``argv``, in the node's environment and ``env``."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    """Path of the log; the same on every node, since the folder is shared."""
    echo: bool = False
    """Show its output on the head's terminal; only for processes of the head's node."""
    listens: str = ""
    """HOST:PORT of a server. Its socket has SO_REUSEPORT, since the node holds the port. It is up once a process
    listens."""
    gpus: tuple[int, ...] = ()
    """GPUs of the node that the process may use."""


class Process(Protocol):
    """A started process on any node."""

    name: str
    log: Path

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""

    def tail(self) -> str:
        """Return the last lines of the log."""

    def signal(self, number: int) -> None: ...

    def last_output_at(self) -> float:
        """Return the time of the last output; it shows which of several processes died first."""

    def heartbeat(self) -> ProcessHeartbeat:
        """Return the current heartbeat; for a process on another node, the last one reported."""


@dataclass(eq=False)
class NotStarted:
    """Process that will be started later."""

    name: str
    log: Path

    def poll(self) -> int:
        return 0

    def tail(self) -> str:
        return ""

    def signal(self, number: int) -> None: ...

    def last_output_at(self) -> float:
        return 0.0

    def heartbeat(self) -> ProcessHeartbeat:
        raise AssertionError(f"{self.name} was not started")


class Node(Protocol):
    """Machine on which processes are started."""

    rank: int
    name: str
    address: str
    interface: str
    """Network interface with ``address``; "" if it was not looked up."""
    role: Role

    @property
    def gpus(self) -> int:
        """Return the number of GPUs for the job."""

    def start(self, spec: Spec) -> Process:
        """Start a process. Raises JobError. An engine gets a temporary folder, which is removed after its end."""

    def free_ports(self, count: int) -> list[int]: ...

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        """Send SIGTERM to processes by name, SIGKILL to the rest after ``grace_s``; return when all have ended."""

    def note(self, name: str) -> None:
        """Record a process's shared memory: after its death the owner of a segment is unknown."""

    def fault(self) -> str | None:
        """Return the reason why no process can be started on this node any more; None if it can."""

    def accounts(self, names: Sequence[str]) -> dict[str, Account]:
        """Return the current state of processes, with their stacks, by name. Takes seconds. A lost node's are left
        out."""


class Started(NamedTuple):
    """A process of an attempt and its node."""

    process: Process
    node: Node
    spec: Spec | None = None
    """Command and environment for a restart; None if the process cannot be restarted."""


def on_every_node(started: Sequence[Started], action: Callable[[Node, list[str]], T]) -> list[T]:
    """Call ``action`` with the names of each node's processes, on all nodes in parallel."""
    by_node: dict[int, tuple[Node, list[str]]] = {}
    for process, node, _ in started:
        by_node.setdefault(node.rank, (node, []))[1].append(process.name)
    with ThreadPoolExecutor(max(1, len(by_node))) as pool:
        return list(pool.map(lambda found: action(*found), by_node.values()))


@dataclass
class LocalNode:
    """This machine. Its processes end with this process, if need be by ``reaper``, and hold the run directory by
    ``keep``."""

    reaper: Reaper
    keep: Sequence[int] = ()
    rank: int = 0
    name: str = ""
    address: str = "127.0.0.1"
    interface: str = ""
    role: Role = "all"
    run_dir: Path | None = None
    """Run directory, recorded in temporary folders."""
    first_port: int | None = None
    """First port, if the settings fix one."""
    visible: Sequence[str] = field(default_factory=gpu_state.visible)
    """Names of the GPUs that the job may use."""
    servers: ForkServers | None = None
    """Processes that engines and trainer ranks are forked from."""
    given: int = 0
    """Number of ports that the attempt has received."""
    children: dict[str, Child] = field(default_factory=dict)
    held: dict[str, socket.socket] = field(default_factory=dict)
    """Ports of an attempt's servers, by HOST:PORT."""

    @property
    def gpus(self) -> int:
        return len(self.visible)

    def start(self, spec: Spec) -> Child:
        """Start a process. Raises JobError."""
        is_engine = kind_of(spec.name) is ProcessKind.ENGINE
        own = {**spec.env, gpu_state.VISIBLE: ",".join(self.visible[number] for number in spec.gpus)}
        try:
            if spec.listens:
                ports.hold_in(self.held, spec.listens)
            folder, env = own_folder(self.run_dir) if is_engine else (None, {})
            try:
                child = Child(
                    spec.name,
                    [sys.executable, *spec.argv],
                    {**own, **env},
                    Path(spec.log),
                    echo=spec.echo,
                    keep=self.keep,
                    servers=self.servers,
                )
            except BaseException:
                remove(folder)
                raise
        except OSError as error:
            raise JobError(f"{spec.name} cannot be started on {self.name or 'this machine'}: {error}") from error
        child.folder = folder
        self.reaper.add(child.pid, folder)
        self.children[spec.name] = child
        if is_engine:
            key = spec.env.get(KEY_VARIABLE) or os.environ.get(KEY_VARIABLE, "")
            child.probe = Probe(spec.listens and f"http://{spec.listens}", key, child.pid, lambda: child.poll() is None)
        return child

    def free_ports(self, count: int) -> list[int]:
        """Choose the ports of the next attempt; the previous attempt's are released."""
        while self.held:
            self.held.popitem()[1].close()
        self.given = count
        return ports.choose(self.address, count, self.first_port)

    def another_port(self) -> int:
        """Return one more port for a server of the attempt. Raises ConfigError."""
        first = None if self.first_port is None else self.first_port + self.given
        [port] = ports.choose(self.address, 1, first)
        self.given += 1
        return port

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        children = [self.children.pop(name) for name in names if name in self.children]
        stop(children, grace_s)
        for child in children:
            if not group_members(child.pid):
                self.reaper.forget(child.pid)

    def note(self, name: str) -> None:
        if (child := self.children.get(name)) is not None:
            child.segments |= shared_memory(child.pid)
            if child.folder is not None and child.segments:
                record_segments(child.folder, child.segments)

    def fault(self) -> str | None:
        return None

    def accounts(self, names: Sequence[str]) -> dict[str, Account]:
        found = {name: self.children[name] for name in names if name in self.children}
        return stacks.ask({name: (child.pid, child.memory) for name, child in found.items()})


def stop(children: Sequence[Child], grace_s: float) -> None:
    """Send SIGTERM to all, then SIGKILL to the rest after ``grace_s``. Return when all have ended and their shared
    memory and folders are removed."""
    segments = {path for child in children for path in child.segments | shared_memory(child.pid)}
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    segments.update(path for child in children for path in shared_memory(child.pid))  # those made since then
    for child in children:
        child.signal(signal.SIGKILL)  # whole groups, with children of dead processes
        child.wait(5)
    deadline = time.monotonic() + GONE_S
    while any(group_members(child.pid) for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)  # a listening socket is free after its last process ends
    for path in segments:
        path.unlink(missing_ok=True)
    for child in children:
        remove(child.folder)


def remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
