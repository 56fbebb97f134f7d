"""Process of a reward function as seen by its owner, and the file for what the function prints.

It is forked from a process that has imported megarl's verifiers (``core/processes/fork.py``), or else started directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Self

import psutil

from megarl.core.processes.fork import Forked, ForkRoot, ForkServer

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
KEPT_BYTES = 2**16
"""Bytes kept from the end of a file that would grow beyond MAX_BYTES."""
EVERY_S = 60.0
"""Seconds between two warnings that the file cannot be written."""
PIPE_BYTES = 2**20


class PrintedOutput:
    """Pipe for the output of reward processes; the event loop copies it to the file ``path`` of at most MAX_BYTES."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: tuple[int, int] | None = None
        self._warned = -EVERY_S

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Return a descriptor for a process to inherit. If the file cannot be opened, printed text is lost, but no
        reward."""
        try:
            self._path.open("ab").close()
        except OSError as error:
            log.warning("what reward functions print is dropped: %s: %s", self._path, error.strerror)
            yield subprocess.DEVNULL
            return
        yield (self._ends or self._open())[1]

    def _open(self) -> tuple[int, int]:
        self._ends = os.pipe()
        os.set_blocking(self._ends[0], False)
        with contextlib.suppress(OSError):  # the user's pipes may have a limit; the default 64 KiB suffice
            fcntl.fcntl(self._ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        asyncio.get_running_loop().add_reader(self._ends[0], self.drain)
        return self._ends

    def close(self) -> None:
        """Close the pipe after the processes have ended; later output is lost."""
        if self._ends is not None:
            asyncio.get_running_loop().remove_reader(self._ends[0])
            self.drain()
            for end in self._ends:
                os.close(end)
            self._ends = None

    def drain(self) -> None:
        """Copy the pipe's content to the file, at most PIPE_BYTES."""
        left = PIPE_BYTES
        while self._ends is not None and left > 0:
            try:
                data = os.read(self._ends[0], KEPT_BYTES)
            except BlockingIOError:
                return
            left -= len(data)
            try:
                self._append(data)
            except OSError as error:
                self._warn(error)

    def _append(self, data: bytes) -> None:
        """Append to the file, first dropping all but its end if it would become too long. Raises OSError."""
        with self._path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size + len(data) > MAX_BYTES:
                file.seek(max(0, size - KEPT_BYTES))
                kept = file.read(KEPT_BYTES)
                file.truncate(0)
                data = b"(%d bytes dropped)\n" % (size - len(kept)) + kept + data
            file.write(data)

    def _warn(self, error: OSError) -> None:
        if time.monotonic() - self._warned >= EVERY_S:
            self._warned = time.monotonic()
            log.warning("what reward functions print is dropped: %s: %s", self._path, error.strerror)


WORKER = "megarl.rewards.pool.worker"
PRELOAD = ("megarl.core.imports", "megarl.rewards")
"""Modules that every worker imports."""
SOCKET = "MEGARL_REWARD_SOCKET"
"""Environment variable with the file descriptor of the process's socket."""
STDERR = 2
END_S = 10.0
"""Maximum seconds to wait for a killed process; in a system call of a broken disk or driver it ends later, or never."""
DRAIN_S = 0.1
"""Seconds to read the last output of an ended process: its descendants may keep the socket open."""
LOOK_S = 0.1
"""Seconds between two polls of a process if Linux cannot report its end."""
servers: dict[tuple[int, tuple[str, ...]], ForkServer] = {}
"""Fork servers, by the id of the process that uses them and their imported modules."""
_roots: dict[int, ForkRoot] = {}
"""Roots of fork servers, by the id of the process that uses them."""


class RewardProcess:
    """A ``megarl.rewards.pool.worker`` in a separate process group. It ends with the thread that started it.

    It is connected by a socket instead of pipes: asyncio's ``Process.wait`` waits for the end of every pipe, which a
    process forked from it may keep open.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | Forked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self.reader = reader
        self.writer = writer
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, limit: int, output: PrintedOutput | None = None, modules: Sequence[str] = ()) -> Self:
        """Start a process with lines of at most ``limit`` bytes. Its printed output goes to ``output``, else to stderr.

        Args:
            modules: Modules that its verifiers import late.

        Raises:
            OSError: the machine cannot start another process.
        """
        server = server_of((*PRELOAD, *modules))
        await asyncio.to_thread(server.await_imports)
        ours, its = socket.socketpair()
        try:
            with its, nullcontext(STDERR) if output is None else output.opened() as printed:
                process = started(server, [WORKER, str(os.getpid())], its.fileno(), printed)
        except BaseException:
            ours.close()
            raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours, limit=limit))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _watch(self) -> None:
        await _ended(self._process)
        kill_tree(self.pid)
        if not self.writer.is_closing():
            await asyncio.sleep(DRAIN_S)
            self.writer.transport.abort()

    async def status(self) -> int | None:
        """Return the exit status of a process with a closed socket; None if it still runs."""
        await asyncio.wait([self._watching], timeout=1.0)
        return self._process.poll()

    async def end(self) -> None:
        """Kill it and its descendants. Returns at its end, or after END_S."""
        self.writer.transport.abort()
        if self._process.poll() is None:
            kill_tree(self.pid)
        _, late = await asyncio.wait([self._watching], timeout=END_S)
        if late:
            log.warning("reward process %d has not ended %g s after SIGKILL; it is left running", self.pid, END_S)


def fork_root() -> None:
    """Fork a root for this process's fork servers now: with its imports, before it has threads."""
    _roots[os.getpid()] = ForkRoot()


def server_of(modules: tuple[str, ...]) -> ForkServer:
    """Return the fork server of this process with these imports, which it may not have yet."""
    server = servers.get((os.getpid(), modules))
    if server is None or (server.closed and server.imported):  # it was killed; failing imports would fail again
        root = _roots.get(os.getpid())
        server = root.server(modules, os.environ) if root is not None else None
        server = servers[os.getpid(), modules] = server or ForkServer.start(modules, os.environ)
    return server


def end_servers() -> None:
    """End the fork servers of this process; workers go on."""
    for key in [key for key in servers if key[0] == os.getpid()]:
        servers.pop(key).close()
    if (root := _roots.pop(os.getpid(), None)) is not None:
        root.close()


def started(
    server: ForkServer, command: Sequence[str], connection: int, printed: int
) -> subprocess.Popen[bytes] | Forked:
    """Fork a process group from a server, or start one if forking is impossible.

    Args:
        command: A module that is run, and its arguments.
        connection: Descriptor of the process's socket.
        printed: Descriptor of its stdout and stderr, or ``subprocess.DEVNULL``.
    """
    argv = ["-m", *command]
    with open(os.devnull, "wb") as null:
        output = null.fileno() if printed == subprocess.DEVNULL else printed
        pid = server.fork(argv, os.environ, output, {SOCKET: connection}, session=False)
    if pid is not None:
        return Forked(pid)
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, SOCKET: str(connection)},
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        pass_fds=[connection],
        process_group=0,
    )


async def _ended(process: subprocess.Popen[bytes] | Forked) -> None:
    """Wait for the end of a process."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        while process.poll() is None:
            await asyncio.sleep(LOOK_S)
        return
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    except asyncio.CancelledError:  # the loop ends first: leave no zombie
        threading.Thread(target=process.wait, args=(math.inf,), daemon=True, name="reward process").start()
        raise
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.poll()


def kill_tree(leader: int) -> None:
    """Kill a process group, and its leader's descendants that have left it."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(leader).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()
