"""The process that runs a reward function, as its owner sees it: a socket, an exit status, and an end that spares
nothing it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from typing import Self

import psutil

from megarl.explore.rewards.pool.output import PrintedOutput

log = logging.getLogger(__name__)

STDERR = 2
END_S = 10.0
"""Longest wait for a killed process; one inside a system call of a broken disk or driver ends later, or never."""
DRAIN_S = 0.1
"""Seconds for which the last output of an ended process is read: what it forked may keep its socket open."""


class RewardProcess:
    """A ``megarl.explore.rewards.pool.worker`` in a process group of its own. It ends with the thread that started it.

    It is connected by a socket and not by pipes: asyncio's ``Process.wait`` waits for the end of every pipe, which a
    process that was forked from it may hold open.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self.reader = reader
        self.writer = writer
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, limit: int, output: PrintedOutput | None = None) -> Self:
        """Start one whose lines have at most ``limit`` bytes. What it prints goes to ``output``, or else to stderr.

        Raises:
            OSError: the machine has no room for another process.
        """
        ours, its = socket.socketpair()
        try:
            with its, nullcontext(STDERR) if output is None else output.opened() as printed:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "megarl.explore.rewards.pool.worker", str(os.getpid()), str(its.fileno()),
                    stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, pass_fds=[its.fileno()], process_group=0,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours, limit=limit))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _watch(self) -> None:
        await self._process.wait()
        kill_tree(self.pid)
        if not self.writer.is_closing():
            await asyncio.sleep(DRAIN_S)
            self.writer.transport.abort()

    async def status(self) -> int | None:
        """Exit status of a process whose socket is closed; None if it runs on."""
        await asyncio.wait([self._watching], timeout=1.0)
        return self._process.returncode

    async def end(self) -> None:
        """Kill it and all that it started. Returns when it is gone, or after END_S."""
        self.writer.transport.abort()
        if self._process.returncode is None:
            kill_tree(self.pid)
        _, late = await asyncio.wait([self._watching], timeout=END_S)
        if late:
            log.warning("reward process %d has not ended %g s after SIGKILL; it is left behind", self.pid, END_S)


def kill_tree(leader: int) -> None:
    """SIGKILL to a process group, and to descendants of its leader that have left it."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(leader).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()
