"""Supervisor of a node other than the head, and the channel between supervisors: JSON lines over one connection."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.buffer.store import VARIABLE
from megarl.config import Config
from megarl.core.errors import ConfigError, JobError
from megarl.core.processes import secrets
from megarl.engines.client.leftovers import remove_stale_folders
from megarl.run.job_store import with_own_password
from megarl.run.nodes import health
from megarl.run.nodes.node import Allocation, LocalNode, Spec
from megarl.run.process.interrupt import StopRequest
from megarl.run.process.process import Child
from megarl.run.process.reaper import Reaper

MAX_LINE_BYTES = 2**24
GREETING_BYTES = 2**12
"""Maximum bytes of a line of the greeting: an unauthenticated peer cannot make this process buffer more."""
GREETING_S = 10.0


class ChannelClosed(JobError):
    """The peer has closed the connection, or was silent for too long."""


class Channel:
    """Messages in both directions; any thread may send, only one receives.

    Args:
        silence_s: Timeout of ``receive`` in seconds; both sides send messages more often.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self.socket = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.silence_s = silence_s
        connection.settimeout(silence_s)

    @property
    def own_address(self) -> str:
        """Return the address of this machine, as the peer sees it."""
        return str(self.socket.getsockname()[0])

    def send(self, **message: Any) -> None:
        """Send a message. Raises ChannelClosed."""
        try:
            with self._sending:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(f"connection lost: {error}") from error

    def receive(self, limit: int = MAX_LINE_BYTES) -> dict[str, Any]:
        """Return the next message, of at most ``limit`` bytes. Raises ChannelClosed."""
        try:
            line = self._lines.readline(limit)
            if not line.endswith(b"\n"):
                raise ChannelClosed(
                    "connection closed" if len(line) < limit else f"a message of more than {limit} bytes"
                )
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            return message
        except TimeoutError as error:
            raise ChannelClosed(f"silent for {self.silence_s:.0f} s") from error
        except RecursionError as error:
            raise ChannelClosed("a message that is nested too deeply") from error
        except (OSError, ValueError) as error:
            raise ChannelClosed(f"connection lost: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a receiving thread
        with contextlib.suppress(OSError):
            self._lines.close()
        self.socket.close()


def greet(connection: socket.socket, key: str, *, serving: bool, silence_s: float) -> Channel:
    """Authenticate both sides: each returns an HMAC of the other's random challenge, so the key is never sent.

    Raises:
        ChannelClosed: the peer has another key, or sends nothing in time.
    """
    channel = Channel(connection, GREETING_S)
    try:
        _prove(channel, key, serving)
    except BaseException:
        channel.close()
        raise
    channel.silence_s = silence_s
    connection.settimeout(silence_s)
    return channel


def _prove(channel: Channel, key: str, serving: bool) -> None:
    own, other = ("head", "node") if serving else ("node", "head")
    mine = secrets.challenge()
    channel.send(challenge=mine)
    theirs = str(channel.receive(GREETING_BYTES).get("challenge"))
    channel.send(proof=secrets.prove(key, theirs, own))
    if not secrets.is_proof(channel.receive(GREETING_BYTES).get("proof"), key, mine, other):
        raise ChannelClosed("the other side has another key (MEGARL_JOB_KEY)")


log = logging.getLogger(__name__)

CONNECT_EVERY_S = 0.5
WATCH_S = 0.1
LOST_GRACE_S = 5.0
"""Seconds for processes to end after the head is lost: the job cannot go on without it."""


def serve(allocation: Allocation, config: Config, key: str) -> int:
    """Run until the head reports the end of the job. Return 0 then, even after a failure: the head reports it.

    Raises:
        JobError: the head cannot be reached, has another key, or is lost.
    """
    run_dir = Path(config.run.dir)
    for folder in remove_stale_folders(run_dir):
        log.info("removed %s, which a killed start of this run had left", folder)
    with StopRequest() as stop_request:
        channel = _connect(allocation, config, key, stop_request)
        try:
            with Reaper() as reaper:
                node = LocalNode(
                    reaper,
                    name=allocation.name,
                    rank=allocation.rank,
                    address=channel.own_address,
                    role=allocation.role,
                    run_dir=run_dir,
                )
                try:
                    return _Agent(channel, node, stop_request, _beat_s(config), key).run()
                finally:
                    node.stop(list(node.children), LOST_GRACE_S)
                    node.end_kept()
        finally:
            channel.close()


def _beat_s(config: Config) -> float:
    """Seconds between two heartbeats of this node and its processes to the head."""
    return min(config.cluster.heartbeat_s / 4, max(1.0, config.cluster.stall_s / 5))


def _connect(allocation: Allocation, config: Config, key: str, stop_request: StopRequest) -> Channel:
    deadline = time.monotonic() + config.cluster.connect_timeout_s
    where = f"node 0 at {allocation.head}:{allocation.port}"
    while True:
        try:
            connection = socket.create_connection((allocation.head, allocation.port), timeout=5)
            channel = greet(connection, key, serving=False, silence_s=config.cluster.heartbeat_s)
            break
        except ChannelClosed as error:
            if "another key" in str(error):
                raise JobError(f"{where}: {error}") from error
            reason: Exception = error
        except OSError as error:
            reason = error
        if stop_request.count:
            raise JobError(f"stopped while waiting for {where}")
        if time.monotonic() > deadline:
            raise JobError(
                f"{where} cannot be reached ({reason}) within "
                f"cluster.connect_timeout_s={config.cluster.connect_timeout_s:g}"
            )
        time.sleep(CONNECT_EVERY_S)
    facts = health.facts(allocation.name or f"node {allocation.rank}", channel.own_address)
    channel.send(rank=allocation.rank, role=allocation.role, facts=asdict(facts))
    return channel


class _Agent:
    def __init__(self, channel: Channel, node: LocalNode, stop_request: StopRequest, beat_s: float, key: str) -> None:
        self._channel = channel
        self._node = node
        self._stop_request = stop_request
        self._beat_s = beat_s
        self._key = key
        self._told: set[Child] = set()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def run(self) -> int:
        threading.Thread(target=self._watch, daemon=True).start()
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed as closed:
                raise JobError(f"node 0 is lost ({closed}): its job ends here too") from closed
            match message.get("do"):
                case "end":
                    return 0
                case "signal":
                    if (child := self._node.children.get(message["name"])) is not None:
                        child.signal(int(message["number"]))
                case "note":
                    self._node.note(message["name"])
                case "stop" | "accounts":  # takes seconds, during which the head may send more
                    threading.Thread(target=self._answer, args=(message,), daemon=True).start()
                case "start" | "ports" | "port" | "run_dir":
                    self._answer(message)  # a process ends with the thread that started it (PR_SET_PDEATHSIG)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = self._do(message)
        except (OSError, ConfigError, JobError) as error:
            answer = {"error": str(error)}
        except (LookupError, TypeError, ValueError) as error:
            answer = {"error": f"malformed request {message.get('do')!r} ({type(error).__name__}: {error})"}
        self._send(event="answer", to=message.get("number"), **answer)

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "start":
            spec = Spec(
                **{**message["spec"], "argv": tuple(message["spec"]["argv"]), "gpus": tuple(message["spec"]["gpus"])}
            )
            with self._lock:
                self._node.start(replace(spec, echo=False, env=self._with_password(spec.env)))
            return {}
        if message["do"] == "ports":
            return {"ports": self._node.free_ports(int(message["count"]))}
        if message["do"] == "port":
            return {"port": self._node.another_port()}
        if message["do"] == "run_dir":
            return {"fault": health.run_dir_fault(Path(message["path"]), message["token"])}
        if message["do"] == "accounts":
            return {"accounts": self._node.accounts(message["names"])}
        with self._lock:
            ending = [child for name, child in self._node.children.items() if name in message["names"]]
        self._node.stop(message["names"], float(message["grace_s"]))
        for child in ending:
            self._send_end(child)
        return {}

    def _with_password(self, env: dict[str, str]) -> dict[str, str]:
        """Return the variables with the password in the store's URL, which the head does not send. Raises
        ConfigError."""
        if VARIABLE not in env:
            return env
        return {**env, VARIABLE: os.environ.get(VARIABLE) or with_own_password(env[VARIABLE], self._key)}

    def _send_end(self, child: Child) -> None:
        with self._sending:  # after the reply to a stop the head has all ends: later ones are of restarts
            if child not in self._told and (status := child.poll()) is not None:
                self._told.add(child)
                self._send(event="ended", name=child.name, status=status, tail=child.tail(), at=child.last_output_at())

    def _watch(self) -> None:
        try:
            self._send_heartbeats()
        # after an error too: without this thread the head would wait until the node counts as silent
        finally:
            self._channel.close()

    def _send_heartbeats(self) -> None:
        beat, wished = 0.0, 0
        while True:
            with self._lock:
                children = list(self._node.children.values())
            for child in children:
                self._send_end(child)
            if self._stop_request.count > wished:
                wished = self._stop_request.count
                self._send(event="stop")
            if time.monotonic() - beat > self._beat_s:
                beat = time.monotonic()
                self._send(
                    event="beat",
                    heartbeats={child.name: child.heartbeat() for child in children if child.poll() is None},
                )
            time.sleep(WATCH_S)

    def _send(self, **message: Any) -> None:
        try:
            self._channel.send(**message)
        except ChannelClosed:
            self._channel.close()  # the receiving thread then ends this process
