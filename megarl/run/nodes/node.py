"""Machines that a launcher gave to this job, and the interface of a node for the head.

Every machine runs one supervisor. Node 0's supervisor, the head, decides; the others (``run/nodes/node_agent.py``)
start the processes that it sends them.

``remote.py`` has the other nodes.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar, cast, get_args

from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import KEEPS, KEPT_IN, ProcessKind, kind_of
from megarl.core.processes.machine import group_members
from megarl.core.processes.memory_files import MemoryFiles
from megarl.engines.client.leftovers import folder_of_run, own_folder, record_segments, shared_memory
from megarl.engines.client.names import KEY_VARIABLE
from megarl.rewards.pool.host import MIN_KEY
from megarl.run.nodes import gpu_state
from megarl.run.process import ports, stacks
from megarl.run.process.process import Child, ForkServers, Probe
from megarl.run.process.reaper import Reaper
from megarl.run.process.stacks import Account, ProcessHeartbeat

Role = Literal["all", "trainer", "rollout"]
"""Processes that may run on a node; ``all`` unless the job has parts (a heterogeneous Slurm job)."""

INTERACTIVE = str(0xFFFFFFFA)
"""Step id of the shell that salloc runs (Slurm's LaunchParameters=use_interactive_step)."""
LOWEST_PORT, PORTS = 20000, 12000
"""Ports of the head if MEGARL_HEAD_PORT is not set: below the ports of outgoing connections."""


@dataclass(frozen=True)
class Allocation:
    """The job's nodes, from the view of one supervisor."""

    rank: int = 0
    """Rank of this node; 0 is the head."""
    nodes: int = 1
    head: str = "127.0.0.1"
    """Address of node 0, where its supervisor accepts the others."""
    port: int = 0
    name: str = ""
    """Name that the launcher gives this node."""
    role: Role = "all"
    launcher: Literal["local", "slurm", "torchrun"] = "local"

    @property
    def is_head(self) -> bool:
        """True on the first node."""
        return self.rank == 0


def find(env: Mapping[str, str] = os.environ) -> Allocation:
    """Return the allocation of this process. MEGARL_HEAD, MEGARL_HEAD_PORT, MEGARL_NODES, MEGARL_NODE_RANK and
    MEGARL_ROLE override the launcher's variables.

    Raises:
        ConfigError: the launcher started too few or too many supervisors, or they share no key.
    """
    if "SLURM_JOB_ID" in env:
        found = _slurm(env)
    elif "TORCHELASTIC_RUN_ID" in env:
        found = _torchrun(env)
    else:
        found = Allocation(name=os.uname().nodename)
    if found.nodes > 1 and len(env.get(KEY_VARIABLE, "")) < MIN_KEY:
        raise ConfigError(
            f"{found.nodes} nodes need one secret of at least {MIN_KEY} characters in ${KEY_VARIABLE}, the same on "
            "all; slurm/common.sh makes one for each job"
        )
    return found


def _slurm(env: Mapping[str, str]) -> Allocation:
    if "SLURM_STEP_NODELIST" not in env or env.get("SLURM_STEP_ID", env.get("SLURM_STEPID")) == INTERACTIVE:
        # a batch script, or a shell in an allocation, which salloc may start as a separate step
        allocated = _number(env, "SLURM_JOB_NUM_NODES") if "SLURM_JOB_NUM_NODES" in env else 1
        if allocated > 1:
            raise ConfigError(
                f"this Slurm job has {allocated} nodes, but megarl was started on one of them: start one on each with "
                "`srun --ntasks-per-node=1 megarl train ...`, as slurm/train_grpo.sh does"
            )
        return Allocation(name=env.get("SLURMD_NODENAME", ""), launcher="slurm")
    nodes = _number(env, "MEGARL_NODES" if env.get("MEGARL_NODES") else "SLURM_STEP_NUM_NODES")
    if not env.get("MEGARL_NODES") and (tasks := _number(env, "SLURM_STEP_NUM_TASKS")) != nodes:
        raise ConfigError(
            f"srun started {tasks} tasks on {nodes} nodes; megarl needs one on each, and starts the rest itself: use "
            "--ntasks-per-node=1"
        )
    return Allocation(
        rank=_number(env, "MEGARL_NODE_RANK" if env.get("MEGARL_NODE_RANK") else "SLURM_PROCID"),
        nodes=nodes,
        # In a batch script srun is called on the job's first node; slurm/common.sh sets MEGARL_HEAD.
        head=env.get("MEGARL_HEAD") or env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
        port=_port(env, LOWEST_PORT + _number(env, "SLURM_JOB_ID") % PORTS),
        name=env.get("SLURMD_NODENAME", ""),
        role=_role(env),
        launcher="slurm",
    )


def _torchrun(env: Mapping[str, str]) -> Allocation:
    if _number(env, "LOCAL_WORLD_SIZE") != 1:
        raise ConfigError(
            f"torchrun --nproc-per-node={env['LOCAL_WORLD_SIZE']}: megarl needs one process on each node and starts "
            "the rest itself; use 1"
        )
    return Allocation(
        rank=_number(env, "RANK"),
        nodes=_number(env, "WORLD_SIZE"),
        head=env.get("MEGARL_HEAD") or env.get("MASTER_ADDR", "127.0.0.1"),
        port=_port(env, _number(env, "MASTER_PORT") + 1),  # MASTER_PORT itself is torchrun's
        name=os.uname().nodename,
        role=_role(env),
        launcher="torchrun",
    )


def _number(env: Mapping[str, str], name: str) -> int:
    """Return the number in a launcher's variable. Raises ConfigError if it is not a number."""
    given = env.get(name, "")
    if not (given.isascii() and given.isdecimal()):
        raise ConfigError(
            f"${name} is {given!r}, which is no number, though other variables of its launcher are set; start megarl "
            "by srun or torchrun, or unset $SLURM_JOB_ID and $TORCHELASTIC_RUN_ID to run on this machine alone"
        )
    return int(given)


def _port(env: Mapping[str, str], otherwise: int) -> int:
    given = env.get("MEGARL_HEAD_PORT")
    if given is not None and not (given.isascii() and given.isdecimal() and 0 < int(given) < 65536):
        raise ConfigError(f"MEGARL_HEAD_PORT={given} is no port; give one of 1..65535, or leave it out")
    return int(given) if given else otherwise


def _role(env: Mapping[str, str]) -> Role:
    role = env.get("MEGARL_ROLE", "all")
    if role not in get_args(Role):
        raise ConfigError(f"MEGARL_ROLE={role}: a node is one of {', '.join(get_args(Role))}")
    return cast(Role, role)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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

    def another_port(self) -> int:
        """Return one more port for a server of the attempt. Raises ConfigError, JobError."""

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
    kept: MemoryFiles | Path | None = None
    """Files with states of trainer ranks (``trainer.keep_state``); they outlive the ranks."""

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
            if (keep := spec.env.get(KEEPS)) is not None:
                if self.kept is None:
                    in_memory = keep == "neighbour"
                    self.kept = MemoryFiles() if in_memory else folder_of_run(self.run_dir, tempfile.gettempdir())
                env[KEPT_IN] = self.kept.address if isinstance(self.kept, MemoryFiles) else str(self.kept)
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
        self.reaper.add(child.pid, self.kept if KEEPS in spec.env and isinstance(self.kept, Path) else folder)
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

    def end_kept(self) -> None:
        """Remove the states of trainer ranks."""
        if isinstance(self.kept, MemoryFiles):
            self.kept.close()
        else:
            remove(self.kept)

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
