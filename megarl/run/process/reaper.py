"""Ends what is left of a job when its supervisor was killed: a process blocked in a collective or in an engine's
shutdown does not end by the SIGTERM that Linux sends it then.

``python -m megarl.run.process.reaper`` reads process groups and their temporary folders, one a line, from a
pipe that only the supervisor holds.
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

from megarl.core.processes.machine import group_members, kill_group
from megarl.core.processes.parent import ALONE_S
from megarl.engines.client.leftovers import remove_folder, shared_memory

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that a reaper with nothing to wait for may take to end."""
AGAIN_S = 5.0
"""Least seconds between two starts of a reaper."""


class Reaper:
    """The reaper's process, as the supervisor sees it; another one takes its place when it dies. Use as a context
    manager; on leaving, all groups should be gone.

    Args:
        lock: Descriptor of the run directory's lock, held as long as the reaper has something to end; None on nodes
            that do not hold it.
        alone_s: How long processes may outlive their supervisor.
    """

    def __init__(self, lock: int | None = None, alone_s: float = ALONE_S) -> None:
        self._lock = lock
        self._alone_s = alone_s
        self.groups: dict[int, Path | None] = {}
        """Process groups to end, and the folder to remove with each."""
        self._sending = threading.Lock()
        self._leaving = threading.Event()
        self.process = self._start()
        """Process of the reaper; another one where that has died."""
        threading.Thread(target=self._keep, daemon=True, name="keeper of the reaper").start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl.run.process.reaper", str(self._alone_s)],
            stdin=subprocess.PIPE,
            bufsize=0,  # nothing is kept for a reaper that has died
            start_new_session=True,
            pass_fds=[] if self._lock is None else [self._lock],
        )

    def _keep(self) -> None:
        """Without one, whoever killed the supervisor next would leave its processes behind."""
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
                with suppress(OSError):  # tried again
                    self.process = self._start()
                for group, folder in self.groups.items():
                    self._send("add", group, folder)

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _send(self, do: str, group: int, folder: Path | None) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has died: the next one is sent everything
            self.process.stdin.write(f"{do} {group} {folder or ''}\n".encode())

    def add(self, group: int, folder: Path | None = None) -> None:
        """Reaper a process group, and a folder to remove with it."""
        with self._sending:
            self.groups[group] = folder
            self._send("add", group, folder)

    def forget(self, group: int) -> None:
        """Forget a process that is gone: its number may be another's soon."""
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
                with suppress(subprocess.TimeoutExpired):  # the kernel keeps it: it ends with this process
                    self.process.wait(END_S)
            # Nothing, unless it was killed.
            end(self.groups, max(0.0, deadline - time.monotonic()), filter(None, self.groups.values()))


def end(groups: Iterable[int], after_s: float, folders: Iterable[Path] = ()) -> None:
    """Wait up to ``after_s`` for the groups to end, then kill them; removes the shared memory that they leave, and
    ``folders``."""
    alive = {group for group in groups if group_members(group)}
    segments = {path for group in alive for path in shared_memory(group)}
    deadline = time.monotonic() + after_s
    while alive and time.monotonic() < deadline:
        time.sleep(0.2)
        alive = {group for group in alive if group_members(group)}
    segments.update(path for group in alive for path in shared_memory(group))  # an engine that was starting makes more
    for group in alive:
        kill_group(group)
    for path in segments:
        path.unlink(missing_ok=True)
    for folder in folders:
        remove_folder(folder)  # with the shared memory of engines that have ended before this looked


def main() -> None:
    groups: dict[int, Path | None] = {}
    for line in sys.stdin:  # until the supervisor closes the pipe, or is gone
        do, group, folder = line.rstrip("\n").split(" ", 2)
        if do == "add":
            groups[int(group)] = Path(folder) if folder else None
        else:
            groups.pop(int(group), None)
    end(groups, float(sys.argv[1]), filter(None, groups.values()))


if __name__ == "__main__":
    main()
