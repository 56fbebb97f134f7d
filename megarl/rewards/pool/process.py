"""Worker process of a pool, on this machine or another: it gets one request at a time and is killed after a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

from megarl.config.load import to_dict
from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError
from megarl.core.processes import secrets
from megarl.rewards.pool.child import PrintedOutput, RewardProcess

START_TIMEOUT_S = 120.0
"""Seconds to start Python and import a verifier on a loaded machine; the limit of a verdict is ``reward.timeout_s``."""
CONNECT_S = 10.0
MAX_LINE_BYTES = 2**24
CALLER, HOST = "reward caller", "reward host"
"""Sides of a connection to a reward host (``processes/secrets.py``)."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 60_000}
VERDICT_FIELDS = {"score", "status", "parts"}
CPUCLOCK_SCHED = 2
"""Clock type in Linux's clock id of a process, which ``clock_getcpuclockid(3)`` computes from the pid."""
BUSY_SHARE = 0.25
"""Share of ``reward.timeout_s`` that a worker must have computed for a timeout to be the response's fault; a worker
that waits, or gets no processor, has computed less."""
CPU_SPENT = -signal.SIGVTALRM
"""Exit status of a process that used all the CPU time that a response may take in megarl's verifiers."""


class WorkerError(RuntimeError):
    """The function raised."""


class WorkerUnfit(WorkerError):
    """The worker cannot load a verifier, through no fault of the row: no sandbox on its machine, or a missing
    package."""


class WorkerDied(WorkerError):
    """The process ended before its reply, or its host cannot be reached."""


class WorkerSpent(WorkerDied):
    """The process used all the CPU time that one of megarl's verdicts may take."""


class WorkerProcess(Protocol):
    """The process of a worker, here or on a reward host."""

    @property
    def pid(self) -> int | None:
        """Process id, if the process runs on this machine."""

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start the process; return the streams from it and to it. Raises WorkerDied."""

    async def ending(self) -> tuple[int | None, str]:
        """Clean up after the process; return (its exit status or None, a text that describes its end)."""

    async def end(self) -> None:
        """End the process, if there is one."""

    def named(self, message: str) -> str:
        """Return an error's message with the process's address, if it runs on another machine."""

    def cpu_s(self) -> float:
        """CPU time of the process so far; NaN if unknown."""

    def drain(self) -> None:
        """Write the process's printed output to its file."""


class Worker:
    """A process's imports, and the streams from and to it. ``ready`` restarts it in any state."""

    def __init__(self, config: RewardConfig, process: WorkerProcess) -> None:
        self._config = config
        self._process = process
        self.prepared: set[str] = set()
        """Data sources whose verifiers the process has imported."""
        self.reader: asyncio.StreamReader | None = None
        """Lines from the process; None until ``ready``."""
        self.writer: asyncio.StreamWriter | None = None
        """Lines to the process."""
        self._requests = 0
        """Number of the last request."""

    @property
    def up(self) -> bool:
        """True if it seems ready for a request."""
        return self.reader is not None and not self.reader.at_eof() and self.reader.exception() is None

    @property
    def pid(self) -> int | None:
        """``WorkerProcess.pid``."""
        return self._process.pid

    async def ready(self) -> None:
        """Ensure a running process that has loaded ``reward.path`` and every verifier used before.

        Raises:
            ConfigError: ``reward.path`` cannot be used.
            WorkerDied: the process ended.
            WorkerUnfit: it cannot load a requested verifier.
        """
        if self.up:
            return
        await self.kill()
        prepared, self.prepared = self.prepared, set()
        self.reader, self.writer = await self._process.open()
        path = self._config.path
        try:
            await self._ask({"config": to_dict(self._config)}, START_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"reward.path={path}: not loaded within {START_TIMEOUT_S:g} s; what it does when it is imported takes "
                "too long"
            ) from error
        except WorkerDied as error:
            if path is None:
                raise
            raise WorkerDied(f"{error} while it loaded reward.path={path}") from error
        except WorkerError as error:
            await self.kill()
            raise ConfigError(str(error)) from error
        for data_source in prepared:
            try:
                await self.prepare(data_source)
            except WorkerError:
                self.prepared |= prepared
                raise

    async def prepare(self, data_source: str) -> None:
        """Import a verifier in advance, so that no task waits for it.

        Raises:
            WorkerUnfit: the import fails here; ``ready`` retries it.
            WorkerError: there is no such verifier.
            WorkerDied, TimeoutError: as for any request.
        """
        if data_source in self.prepared:
            return
        try:
            await self._ask({"prepare": data_source}, START_TIMEOUT_S)
        except WorkerUnfit:
            await self.kill()
            self.prepared.add(data_source)
            raise
        self.prepared.add(data_source)

    async def score(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the verdict of one answer within ``reward.timeout_s``. Raises WorkerError, TimeoutError."""
        return await self._verdict({"score": request})

    async def explain(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return as ``score``, with the ``steps`` of the verdict (``answer/trace.py``)."""
        return await self._verdict({"explain": request})

    async def _verdict(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = await self._ask(request, self._config.timeout_s)
        if not reply.keys() >= VERDICT_FIELDS:
            raise WorkerError(self._process.named(f"the reward process sent no verdict: {str(reply)[:200]}"))
        return reply

    async def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and return its reply. A worker is killed if it does not reply in time or its caller is
        cancelled."""
        try:
            return await self._reply(request, timeout_s)
        finally:
            self._process.drain()  # a verdict's printed text is in the file before the verdict is returned

    async def _reply(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.reader is not None and self.writer is not None
        self._requests = number = self._requests + 1
        before_s = self._process.cpu_s()
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation
                line = await self._exchange(json.dumps({"id": number, **request}).encode() + b"\n")
        except (TimeoutError, asyncio.CancelledError) as error:
            busy = self._process.cpu_s() - before_s >= BUSY_SHARE * timeout_s
            await self.kill()
            if busy and isinstance(error, TimeoutError) and "prepare" not in request and self._config.path is None:
                raise WorkerSpent(f"no verdict within {timeout_s:g} s") from error
            raise
        except ValueError as error:  # the rest of the line would be read as the next replies
            await self.kill()
            raise WorkerError(f"the reward process sent more than {MAX_LINE_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            status, how = await self._process.ending()
            await self.kill()
            raise (WorkerSpent if status == CPU_SPENT else WorkerDied)(how)
        try:
            reply = _parsed(line)
        except ValueError as error:
            await self.kill()
            raise WorkerError(
                self._process.named(f"the reward process sent no reply: {error}: {line[:200]!r}")
            ) from error
        if "spent" in reply:
            await self.kill()
            raise WorkerSpent(self._process.named("the reward process used too much CPU time"))
        if reply.get("id", number) not in (number, None):
            await self.kill()
            raise WorkerDied(
                self._process.named(f"the reward process answered request {reply['id']!r:.20} and not {number}")
            )
        if reply.pop("last", False):
            await self.kill()
        if "error" in reply:
            raise (WorkerUnfit if "prepare" in request and not reply.get("of_row") else WorkerError)(
                self._process.named(reply["error"])
            )
        return reply

    async def _exchange(self, request: bytes) -> bytes:
        assert self.reader is not None and self.writer is not None
        with contextlib.suppress(OSError):  # it has died; the read below shows it
            self.writer.write(request)
            await self.writer.drain()
        try:
            return await self.reader.readline()
        except OSError:  # also TimeoutError, which keepalive raises for a lost connection
            return b""

    async def kill(self) -> None:
        """End the process; ``ready`` starts another."""
        await self._process.end()
        writer, self.reader, self.writer = self.writer, None, None
        if writer is not None:
            if not writer.is_closing():
                writer.transport.abort()  # its buffered data does not matter, and the other side may not be reading
            with contextlib.suppress(OSError):
                async with asyncio.timeout(CONNECT_S):
                    await writer.wait_closed()


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse a reply. Raises ValueError."""
    try:
        reply = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(reply, dict):
        raise ValueError("not an object")
    return reply


class LocalRewardProcess:
    """A process on this machine.

    Args:
        output: Receives what the function prints; by default it goes to stderr.
        modules: Modules that its verifiers import late.
    """

    def __init__(self, output: PrintedOutput | None = None, modules: Sequence[str] = ()) -> None:
        self._output = output
        self._modules = modules
        self._process: RewardProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def cpu_s(self) -> float:
        with contextlib.suppress(OSError):
            if self._process is not None:
                return time.clock_gettime(~self._process.pid << 3 | CPUCLOCK_SCHED)
        return math.nan

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            self._process = await RewardProcess.start(MAX_LINE_BYTES, self._output, self._modules)
        except OSError as error:
            raise WorkerDied(f"a reward process cannot be started: {error.strerror}") from error
        return self._process.reader, self._process.writer

    async def ending(self) -> tuple[int | None, str]:
        status = None if self._process is None else await self._process.status()
        if status is None:
            return None, "the reward process closed its connection"
        return status, f"the reward process ended with code {status}"

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    def named(self, message: str) -> str:
        return message

    def drain(self) -> None:
        if self._output is not None:
            self._output.drain()


def addresses(hosts: Sequence[str]) -> list[str]:
    """Return HOST:PORT of each process in ``reward.hosts``. Raises ConfigError for entries other than HOST:PORT or
    HOST:PORT*N."""
    found: list[str] = []
    for entry in hosts:
        address, star, count = entry.partition("*")
        host, _, port = address.rpartition(":")
        if (
            not entry.isascii()
            or not host
            or not port.isdecimal()
            or (star and not count.isdecimal())
            or not 0 < int(port) < 65536
            or count == "0"
        ):
            raise ConfigError(
                f"reward.hosts: {entry!r} is not HOST:PORT*N (N processes of the `megarl rewards serve` there)"
            )
        found += [address] * int(count or 1)
    return found


class RemoteRewardProcess:
    """A process of a ``megarl rewards serve``: it ends with its connection.

    Args:
        address: ``HOST:PORT``.
        key: Key of the service.
    """

    pid = None

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._key = key

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=MAX_LINE_BYTES)
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            await self._greet(reader, writer)
        except OSError as error:
            writer.transport.abort()
            raise self._unreachable(error) from error
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Prove to each other that both sides know the key. Raises OSError, WorkerDied."""
        keep_alive(writer)
        mine = secrets.challenge()
        theirs = str((await self._greeting(reader)).get("challenge"))
        await send_line(writer, challenge=mine, proof=secrets.prove(self._key, theirs, CALLER))
        if not secrets.is_proof((await self._greeting(reader)).get("proof"), self._key, mine, HOST):
            raise WorkerDied(f"reward.hosts: {self._address} gives no worker: it has another key (MEGARL_JOB_KEY)")
        await self._greeting(reader, START_TIMEOUT_S)  # the host has started the process

    async def _greeting(self, reader: asyncio.StreamReader, timeout_s: float | None = None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(CONNECT_S if timeout_s is None else timeout_s):
                line = await reader.readline()
            answer = _parsed(line) if line.endswith(b"\n") else {"error": "it closed the connection"}
        except ValueError as error:
            answer = {"error": f"it is no `megarl rewards serve` ({error})"}
        if "error" in answer:
            raise WorkerDied(f"reward.hosts: {self._address} gives no worker: {answer['error']}")
        return answer

    def _unreachable(self, error: OSError) -> WorkerDied:
        why = str(error) or "no answer"
        return WorkerDied(
            f"reward.hosts: {self._address} cannot be reached ({why}); is `megarl rewards serve` up there?"
        )

    async def ending(self) -> tuple[int | None, str]:
        return None, f"the reward process at {self._address} ended"

    async def end(self) -> None:
        """Do nothing: the process ends with the connection."""

    def named(self, message: str) -> str:
        return f"{self._address}: {message}"

    def cpu_s(self) -> float:
        return math.nan

    def drain(self) -> None:
        """Do nothing: the reward host writes the process's output."""


async def send_line(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Send a JSON line. Raises OSError."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Make the kernel close a connection after 60 s without a packet or probe answered by the other machine."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def check_hosts(config: RewardConfig, key: str, data_sources: Sequence[str]) -> None:
    """Raise ConfigError naming the first host of ``reward.hosts`` that cannot provide a worker with these verifiers."""
    for address in dict.fromkeys(addresses(config.hosts)):
        worker = Worker(config, RemoteRewardProcess(address, key))
        try:
            await worker.ready()
            for data_source in data_sources:
                await worker.prepare(data_source)
        except (WorkerError, TimeoutError) as error:
            raise ConfigError(
                f"reward.hosts: {str(error) or 'no answer'}; fix that host, or leave {address} out"
            ) from error
        finally:
            await worker.kill()


async def await_hosts(hosts: Sequence[str], timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until every host (HOST:PORT*N) accepts connections. Raises ConfigError naming one that does not in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    for address in dict.fromkeys(addresses(hosts)):
        host, _, port = address.rpartition(":")
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                break
            except (OSError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ConfigError(
                        f"the reward workers of a node at {address} cannot be reached: {str(error) or 'no answer'}"
                    ) from error
            await asyncio.sleep(0.2)
