"""Other nodes, from the head's view: their supervisors connect, and receive the processes to start."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megarl.buffer.store import VARIABLE
from megarl.core.errors import ConfigError, JobError
from megarl.core.processes.heartbeat import START
from megarl.engines.client.names import KEY_VARIABLE
from megarl.run.job_store import without_password
from megarl.run.nodes import health
from megarl.run.nodes.node import Allocation, Role, Spec
from megarl.run.nodes.node_agent import Channel, ChannelClosed, greet
from megarl.run.process.interrupt import StopRequest
from megarl.run.process.stacks import ANSWER_S, Account, ProcessHeartbeat

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks for a stop request while the head waits for nodes."""
LATE_S = 20.0
"""Seconds that a head that ends early waits for the other supervisors, to notify them."""
END_S = 10.0
"""Seconds that the head waits for the other supervisors to end."""
ACCOUNTS_S = 10.0
"""Seconds for a node to report the state of its processes, in addition to the processes' time."""
ACCEPT_AGAIN_S = 1.0
"""Seconds to pause after a failed accept."""
STARTED_S = 60.0
"""Seconds for a node to start a process or find free ports."""


class RemoteProcess:
    """A process on another node, whose supervisor reports its state."""

    def __init__(self, spec: Spec, node: RemoteNode) -> None:
        self.name = spec.name
        self.log = Path(spec.log)
        self._node = node
        self._ending: dict[str, Any] | None = None
        self._heartbeat = ProcessHeartbeat(0, 0, 0, 0.0, START, "S")

    def heartbeat(self) -> ProcessHeartbeat:
        return self._heartbeat

    def showed(self, heartbeat: Sequence[Any]) -> None:
        self._heartbeat = ProcessHeartbeat(
            *(kind(value) for kind, value in zip((int, int, int, float, str, str), heartbeat, strict=True))
        )

    def ended(self, message: dict[str, Any]) -> None:
        self._ending = {"status": int(message["status"]), "tail": str(message["tail"]), "at": float(message["at"])}

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self._ending is None and (fault := self._node.fault()) is not None:
            self._ending = {
                "status": 1,
                "tail": f"its node {self._node.name} is lost: {fault}",
                "at": self._node.lost_at,
            }
        return None if self._ending is None else int(self._ending["status"])

    def tail(self) -> str:
        """Return the last lines of the log."""
        return str(self._ending["tail"]) if self._ending is not None else ""

    def signal(self, number: int) -> None:
        self._node.send(do="signal", name=self.name, number=number)

    def last_output_at(self) -> float:
        return float(self._ending["at"]) if self._ending is not None else time.time()


class RemoteNode:
    """One node whose supervisor is connected."""

    def __init__(self, channel: Channel, hello: dict[str, Any]) -> None:
        self.channel = channel
        """Connection to the node's supervisor."""
        self.rank = int(hello["rank"])
        self.role: Role = hello["role"]
        self.facts = health.from_message(hello["facts"])
        self.arrived = time.time()
        self.name, self.address, self.interface = self.facts.name, self.facts.address, self.facts.interface
        self.gpus = self.facts.gpus
        self.stop_request = StopRequest()
        """Counts stop requests to the node's supervisor, from Slurm or a person."""
        self.lost_at = 0.0
        self._fault: str | None = None
        self.processes: dict[str, RemoteProcess] = {}
        """Name -> process of this node."""
        self._replies: dict[str, dict[str, Any]] = {}
        self._received = threading.Condition()
        threading.Thread(target=self._listen, daemon=True, name=f"node {self.rank}").start()
        threading.Thread(target=self._beat, daemon=True, name=f"node {self.rank} beat").start()

    def _listen(self) -> None:
        fault = "its connection is no longer read"
        try:
            while True:
                self._receive(self.channel.receive())
        except ChannelClosed as closed:
            fault = str(closed)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            fault = f"it sent a malformed message ({type(error).__name__}: {error})"
        finally:
            with self._received:
                if self._fault is None:
                    self._fault, self.lost_at = fault, time.time()
                self._received.notify_all()
            self.channel.close()

    def _receive(self, message: dict[str, Any]) -> None:
        with self._received:
            match message.get("event"):
                case "ended":
                    if (process := self.processes.get(message["name"])) is not None:
                        process.ended(message)
                case "beat":
                    for name, heartbeat in message.get("heartbeats", {}).items():
                        if (process := self.processes.get(name)) is not None:
                            process.showed(heartbeat)
                case "stop":
                    self.stop_request.ask(1)  # all nodes receive the same stop
                case "answer":
                    self._replies[message["to"]] = message
            self._received.notify_all()

    def _beat(self) -> None:
        while self.fault() is None:
            self.send(do="beat")
            time.sleep(self.channel.silence_s / 4)

    def send(self, **message: Any) -> None:
        """Send a message if the node is reachable; otherwise ``fault`` returns the reason."""
        with suppress(ChannelClosed):
            self.channel.send(**message)

    def _request(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        number = secrets.token_hex(8)
        self.send(**message, number=number)
        with self._received:
            self._received.wait_for(lambda: number in self._replies or self._fault is not None, timeout_s)
            answer = self._replies.pop(number, None)
        if answer is None:
            what = message["do"]
            raise JobError(f"node {self.name}: {self._fault or f'no answer to {what!r} in {timeout_s:.0f} s'}")
        if "error" in answer:
            raise JobError(f"node {self.name}: {answer['error']}")
        return answer

    def start(self, spec: Spec) -> RemoteProcess:
        """Start a process. Raises JobError."""
        process = RemoteProcess(spec, self)
        with self._received:
            self.processes[spec.name] = process
        env = {
            name: value for name, value in spec.env.items() if name != KEY_VARIABLE
        }  # the node has the key; it must not be sent
        if VARIABLE in env:
            env[VARIABLE] = without_password(env[VARIABLE])
        self._request(STARTED_S, do="start", spec=asdict(replace(spec, env=env)))
        return process

    def free_ports(self, count: int) -> list[int]:
        return [int(port) for port in self._request(STARTED_S, do="ports", count=count)["ports"]]

    def another_port(self) -> int:
        return int(self._request(STARTED_S, do="port")["port"])

    def check_run_dir(self, run_dir: str, token: str) -> str | None:
        fault: str | None = self._request(STARTED_S, do="run_dir", path=run_dir, token=token)["fault"]
        return fault

    def is_there(self) -> bool:
        """Return True if the node answers. A disconnected node counts as lost only after ``cluster.heartbeat_s``."""
        with suppress(JobError):
            self._request(2 * self.channel.silence_s, do="ports", count=0)
        return self.fault() is None

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        with suppress(JobError):  # lost: it ends its processes by itself
            self._request(grace_s + STARTED_S, do="stop", names=list(names), grace_s=grace_s)

    def note(self, name: str) -> None:
        self.send(do="note", name=name)

    def accounts(self, names: Sequence[str]) -> dict[str, Account]:
        with suppress(JobError):
            answer = self._request(ANSWER_S + ACCOUNTS_S, do="accounts", names=list(names))
            return {name: Account(*account) for name, account in answer["accounts"].items()}
        return {}

    def fault(self) -> str | None:
        return self._fault

    def end(self) -> None:
        """Make the node's supervisor end with status 0: srun takes the largest status, and only the head's shows the
        job's end."""
        self.send(do="end")
        with self._received:
            self._received.wait_for(lambda: self._fault is not None, END_S)


class Gathering:
    """Accepts connections of the other nodes' supervisors while the context manager is active.

    Raises:
        ConfigError: the head's address is not this machine's, or the port is taken.
    """

    def __init__(self, allocation: Allocation, key: str, silence_s: float) -> None:
        self._allocation = allocation
        self._key = key
        self._silence_s = silence_s
        self.nodes: dict[int, RemoteNode] = {}
        """Rank -> connected node."""
        self.expected = set(range(1, allocation.nodes))
        """Ranks of the nodes that have not connected yet."""
        self._came = threading.Condition()
        self._closed = threading.Event()
        self.door: socket.socket | None = None
        """Listening socket for the other supervisors."""
        if allocation.nodes > 1:
            try:
                self.door = socket.create_server((allocation.head, allocation.port))
            except OSError as error:
                raise ConfigError(
                    f"node 0 cannot listen on {allocation.head}:{allocation.port} ({error.strerror}); set MEGARL_HEAD "
                    "to an address of it, MEGARL_HEAD_PORT to a free port"
                ) from error

    def __enter__(self) -> Self:
        if self.door is not None:
            threading.Thread(target=self._let_in, daemon=True, name="door").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._came:  # supervisors still connecting would wait for a head that has ended
            self._came.wait_for(lambda: self.expected <= self.nodes.keys(), LATE_S)
        self._closed.set()
        if self.door is not None:
            with suppress(OSError):
                self.door.shutdown(socket.SHUT_RDWR)
            self.door.close()
        for node in self.nodes.values():
            node.end()

    def _let_in(self) -> None:
        assert self.door is not None
        while True:
            try:
                connection, where = self.door.accept()
            except OSError as error:  # e.g. no free descriptor, or the peer has closed
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                log.warning("a connection to %s:%d failed: %s", self._allocation.head, self._allocation.port, error)
                continue
            threading.Thread(target=self._welcome, args=(connection, where), daemon=True).start()

    def _welcome(self, connection: socket.socket, where: Any) -> None:
        try:
            channel = greet(connection, self._key, serving=True, silence_s=self._silence_s)
            node = RemoteNode(channel, channel.receive())
        except (ChannelClosed, LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("%s:%s wanted to join the job: %s", *where[:2], error)
            connection.close()
            return
        with self._came:
            before = self.nodes.get(node.rank)
            if before is not None and before.fault() is None:
                log.warning("a second node %d wanted to join the job, from %s", node.rank, where[0])
                node.end()
                return
            self.nodes[node.rank] = node
            self._came.notify_all()

    def wait(self, timeout_s: float, stopping: Callable[[], bool] = lambda: False) -> list[RemoteNode]:
        """Return all other nodes, by rank.

        Raises JobError if some do not connect in time, KeyboardInterrupt once ``stopping`` returns True.
        """
        deadline = time.monotonic() + timeout_s
        with self._came:
            while not self.expected <= self.nodes.keys() and (left := deadline - time.monotonic()) > 0:
                if stopping():
                    raise KeyboardInterrupt
                self._came.wait(min(left, LOOK_S))
            missing = sorted(self.expected - self.nodes.keys())
            if missing:
                raise JobError(
                    f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self._allocation.nodes} did "
                    f"not come to {self._allocation.head}:{self._allocation.port} within "
                    f"cluster.connect_timeout_s={timeout_s:g}: look at their output"
                )
            return [self.nodes[rank] for rank in sorted(self.expected)]
