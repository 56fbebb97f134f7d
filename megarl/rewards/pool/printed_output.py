"""File for what reward functions print, kept apart from the protocol and the terminal, and limited in size."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
