"""The file for what reward functions print: neither the protocol nor the terminal has room for it, and it must not fill a disk."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
KEPT_BYTES = 2**16
"""Of a file that has grown beyond MAX_BYTES: its end."""
EVERY_S = 1.0
"""Seconds between two looks at the size; what a process prints in between comes on top of MAX_BYTES."""


class Output:
    """Reward processes append to the file ``path``; ``bounding`` keeps it short."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor for a process to inherit. A file that cannot be opened costs what is printed, and no reward."""
        try:
            file = self._path.open("ab", buffering=0)
        except OSError as error:
            log.warning("what reward functions print is dropped: %s: %s", self._path, error.strerror)
            yield subprocess.DEVNULL
            return
        with file:
            yield file.fileno()

    async def bounding(self) -> None:
        """Shorten the file whenever it is too long, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.shorten()
            except OSError as error:
                log.warning("%s cannot be shortened: %s", self._path, error.strerror)
                await asyncio.sleep(60 * EVERY_S)

    def shorten(self) -> None:
        """Drop all but the end of a file that is too long. Raises OSError."""
        if not self._path.exists() or (size := self._path.stat().st_size) <= MAX_BYTES:
            return
        with self._path.open("a+b", buffering=0) as file:
            file.seek(size - KEPT_BYTES)
            kept = file.read(KEPT_BYTES)
            file.truncate(0)  # whoever prints appends, and goes on behind what is kept
            file.write(b"(%d bytes dropped)\n" % (size - len(kept)) + kept)
