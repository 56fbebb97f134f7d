"""A node of a job as the head sees it, and this machine as one. ``remote.py`` has the nodes that are elsewhere."""

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
"""Seconds for which a killed process is waited for: it gives back all its memory first."""


@dataclass(frozen=True)
class Spec:
    """A process to start: this Python with ``argv``, in the node's environment and ``env``."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    """Path; shared folders have the same one on every node."""
    echo: bool = False
    """Show what it prints on the head's terminal; only for processes of the head's node."""
    listens: str = ""
    """HOST:PORT of a server, whose socket has SO_REUSEPORT: the node holds the port. It is up once somebody listens
    there."""
    gpus: tuple[int, ...] = ()
    """GPUs of the node that it may use, and no others."""


class Process(Protocol):
    """A started process, wherever it runs."""

    name: str
    log: Path

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""

    def tail(self) -> str:
        """Its last lines."""

    def signal(self, number: int) -> None: ...

    def last_output_at(self) -> float:
        """Time of its last output; shows which of several died first."""

    def heartbeat(self) -> ProcessHeartbeat:
        """Heartbeat of now; for a process elsewhere, that of its node's last report."""


@dataclass(eq=False)
class NotStarted:
    """Process that is to be started later."""

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
    """Place where processes are started."""

    rank: int
    name: str
    address: str
    interface: str
    """Network interface that has ``address``; "" where it was not asked for."""
    role: Role

    @property
    def gpus(self) -> int:
        """Number of GPUs that it has for the job."""

    def start(self, spec: Spec) -> Process:
        """Raises JobError. An engine gets a temporary folder of its own, which ends with it."""

    def free_ports(self, count: int) -> list[int]: ...

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        """SIGTERM to processes by name, SIGKILL to what is left after ``grace_s``; returns when they are gone."""

    def note(self, name: str) -> None:
        """Remember a process' shared memory: when it dies nobody knows any more which was its."""

    def fault(self) -> str | None:
        """Reason why nothing more can be started here; None while it can."""

    def accounts(self, names: Sequence[str]) -> dict[str, Account]:
        """State of the processes now, by name, with their stacks; takes seconds. Those of a lost node are left out."""


class Started(NamedTuple):
    """A process of an attempt, and where it runs."""

    process: Process
    node: Node
    spec: Spec | None = None
    """Command and environment for another start; without one there is none."""


def on_every_node(started: Sequence[Started], action: Callable[[Node, list[str]], T]) -> list[T]:
    """``action`` with the names of a node's processes, on all nodes at once."""
    by_node: dict[int, tuple[Node, list[str]]] = {}
    for process, node, _ in started:
        by_node.setdefault(node.rank, (node, []))[1].append(process.name)
    with ThreadPoolExecutor(max(1, len(by_node))) as pool:
        return list(pool.map(lambda found: action(*found), by_node.values()))


@dataclass
class LocalNode:
    """This machine. What it starts ends with this process, by ``reaper`` if need be, and holds the run directory by
    ``keep``."""

    reaper: Reaper
    keep: Sequence[int] = ()
    rank: int = 0
    name: str = ""
    address: str = "127.0.0.1"
    interface: str = ""
    role: Role = "all"
    run_dir: Path | None = None
    """Run directory with which temporary folders are marked."""
    first_port: int | None = None
    """Ports from here on, where the setting gives one."""
    visible: Sequence[str] = field(default_factory=gpu_state.visible)
    """Names of the GPUs that the job may use."""
    servers: ForkServers | None = None
    """Processes to fork engines and trainer ranks from."""
    given: int = 0
    """Ports that the attempt has got."""
    children: dict[str, Child] = field(default_factory=dict)
    held: dict[str, socket.socket] = field(default_factory=dict)
    """Ports of an attempt's servers, by HOST:PORT."""

    @property
    def gpus(self) -> int:
        return len(self.visible)

    def start(self, spec: Spec) -> Child:
        """Raises JobError."""
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
        """Ports of the next attempt; those of the one before are given up."""
        while self.held:
            self.held.popitem()[1].close()
        self.given = count
        return ports.choose(self.address, count, self.first_port)

    def another_port(self) -> int:
        """One more port for a server of the attempt. Raises ConfigError."""
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
    """SIGTERM to all, then SIGKILL to what is left after ``grace_s``; returns when all are gone, their shared memory
    and folders too."""
    segments = {path for child in children for path in child.segments | shared_memory(child.pid)}
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    segments.update(path for child in children for path in shared_memory(child.pid))  # made since by what did not end
    for child in children:
        child.signal(signal.SIGKILL)  # whole groups: also what a dead process left behind
        child.wait(5)
    deadline = time.monotonic() + GONE_S
    while any(group_members(child.pid) for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)  # a socket that they listen on is free when the last of them is gone
    for path in segments:
        path.unlink(missing_ok=True)
    for child in children:
        remove(child.folder)


def remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
