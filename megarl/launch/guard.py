"""Ends what is left of a job when its supervisor was killed: a process blocked in a collective or in an engine's shutdown
does not end by the SIGTERM that Linux sends it then.

``python -m megarl.launch.guard`` reads process groups, one a line, from a pipe that only the supervisor holds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from megarl.rollout.engine import group_members, shared_memory

ALONE_S = 20.0
"""How long processes may outlive their supervisor: they may be saving a checkpoint."""


class Guard:
    """The guard's process, as the supervisor sees it. Use as a context manager; on leaving, all groups should be gone.

    Args:
        lock: Descriptor of the run directory's lock, held as long as the guard has something to end; None on nodes that do not hold it.
    """

    def __init__(self, lock: int | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.launch.guard"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )

    def add(self, group: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{group}\n".encode())
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def end(groups: Iterable[int], after_s: float) -> None:
    """Wait up to ``after_s`` for the groups to end, then kill them; removes the shared memory that they leave."""
    alive = {group for group in groups if group_members(group)}
    segments = {path for group in alive for path in shared_memory(group)}
    deadline = time.monotonic() + after_s
    while alive and time.monotonic() < deadline:
        time.sleep(0.2)
        alive = {group for group in alive if group_members(group)}
    segments.update(path for group in alive for path in shared_memory(group))  # an engine that was starting makes more
    for group in alive:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for path in segments:
        path.unlink(missing_ok=True)


def main() -> None:
    groups = [int(line) for line in sys.stdin]  # until the supervisor closes the pipe, or is gone
    end(groups, ALONE_S)


if __name__ == "__main__":
    main()
