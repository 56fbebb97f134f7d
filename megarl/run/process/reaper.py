"""Ends a job's remaining processes after its supervisor was killed. Linux sends them SIGTERM then, which does not end a
process blocked in a collective or in an engine's shutdown.

``python -m megarl.run.process.reaper`` reads process groups and their temporary folders, one a line, from a pipe whose
only writer is the supervisor.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.core.processes.machine import ALONE_S, group_members, kill_group
from megarl.engines.client.leftovers import remove_folder, shared_memory

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds until a reaper that has no process to wait for must have ended."""
AGAIN_S = 5.0
"""Minimum seconds between two starts of a reaper."""


class Reaper:
    """The supervisor's handle of the reaper process; starts another reaper when it dies. Use it as a context manager,
    and leave it after all groups have ended.

    Args:
        lock: Descriptor of the run directory's lock, kept open until the reaper has ended its groups; None on nodes
            without that lock.
        alone_s: Seconds that processes may outlive their supervisor.
    """

    def __init__(self, lock: int | None = None, alone_s: float = ALONE_S) -> None:
        self._lock = lock
        self._alone_s = alone_s
        self.groups: dict[int, Path | None] = {}
        """Process groups to end, and the folder to remove with each."""
        self._sending = threading.Lock()
        self._leaving = threading.Event()
        self.process = self._start()
        """Current reaper process."""
        threading.Thread(target=self._keep, daemon=True, name="keeper of the reaper").start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl.run.process.reaper", str(self._alone_s)],
            stdin=subprocess.PIPE,
            bufsize=0,  # unbuffered: lines for a dead reaper must not wait in a buffer
            start_new_session=True,
            pass_fds=[] if self._lock is None else [self._lock],
        )

    def _keep(self) -> None:
        """Restart a dead reaper: without one, a kill of the supervisor would leave its processes running."""
        while True:
            began = time.monotonic()
            status = self.process.wait()
            if self._leaving.wait(max(0.0, began + AGAIN_S - time.monotonic())):
                return
            with self._sending:
                if self._leaving.is_set():
                    return
                log.warning("the reaper of this job's processes has ended (status %d); starting another", status)
                self._close()
                with suppress(OSError):  # the next round retries
                    self.process = self._start()
                for group, folder in self.groups.items():
                    self._send("add", group, folder)

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _send(self, do: str, group: int, folder: Path | None) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has died: the next one receives all groups
            self.process.stdin.write(f"{do} {group} {folder or ''}\n".encode())

    def add(self, group: int, folder: Path | None = None) -> None:
        """Register a process group for the reaper, and a folder to remove with it."""
        with self._sending:
            self.groups[group] = folder
            self._send("add", group, folder)

    def forget(self, group: int) -> None:
        """Forget a process that has ended: its number may soon be reused."""
        with self._sending:
            self._send("forget", group, self.groups.pop(group, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._sending:
            self._leaving.set()
            self._close()
            deadline = time.monotonic() + (self._alone_s if any(map(group_members, self.groups)) else 0.0)
            try:
                self.process.wait(deadline + END_S - time.monotonic())
            except subprocess.TimeoutExpired:
                log.warning("the reaper of this job's processes does not end; killing it")
                self.process.kill()
                with suppress(subprocess.TimeoutExpired):  # blocked in the kernel; it ends with this process
                    self.process.wait(END_S)
            # Does nothing unless the reaper was killed.
            end(self.groups, max(0.0, deadline - time.monotonic()), filter(None, self.groups.values()))


def end(groups: Iterable[int], after_s: float, folders: Iterable[Path] = ()) -> None:
    """Wait up to ``after_s`` for the groups to end, then kill them. Remove their shared memory and ``folders``."""
    alive = {group for group in groups if group_members(group)}
    segments = {path for group in alive for path in shared_memory(group)}
    deadline = time.monotonic() + after_s
    while alive and time.monotonic() < deadline:
        time.sleep(0.2)
        alive = {group for group in alive if group_members(group)}
    segments.update(path for group in alive for path in shared_memory(group))  # a starting engine has made more
    for group in alive:
        kill_group(group)
    for path in segments:
        path.unlink(missing_ok=True)
    for folder in folders:
        remove_folder(folder)  # including shared memory of engines that ended before this call


def main() -> None:
    groups: dict[int, Path | None] = {}
    for line in sys.stdin:  # until the supervisor closes the pipe or dies
        do, group, folder = line.rstrip("\n").split(" ", 2)
        if do == "add":
            groups[int(group)] = Path(folder) if folder else None
        else:
            groups.pop(int(group), None)
    end(groups, float(sys.argv[1]), filter(None, groups.values()))


if __name__ == "__main__":
    main()
