"""Processes and memory of this machine: process groups, failed allocations, ends with the parent.

Imports no torch: the supervisor has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Control group of this process; a container sees its group here."""
KILLS = 200
"""Most rounds of killing processes that start others."""
KILLED_S = 0.01
"""Seconds for killed processes to end before the next search."""


def group_members(group: int) -> list[int]:
    """Process ids in a process group and in the session of the same number, without pure zombies (Linux)."""
    members, number = [], str(group).encode()
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The command in parentheses may contain spaces: state, parent, group and session follow the last ")".
                state, _, *numbers = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 4)[:4]
                # The first thread of a killed process is a zombie immediately. The last thread to end frees the memory,
                # and only then closes the sockets on which the group may have listened.
                if number in numbers and (state != b"Z" or len(os.listdir(f"/proc/{pid}/task")) > 1):
                    members.append(int(pid))
    return members


def _read(path: str) -> bytes:
    """Return a small file of ``/proc``, at a quarter of the cost of ``read_bytes``: it is called for each process."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def kill_group(group: int) -> None:
    """Send SIGKILL to a process group, and to all groups in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for pid in group_members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_marked(variable: str) -> None:
    """Send SIGKILL to all processes started with ``variable``, NAME=value, in their environment.

    Also finds processes that have left their session. Repeats until none is found, since they may start others.
    """
    for _ in range(KILLS):
        found = processes_with(variable.encode())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILLED_S)


def processes_with(variable: bytes) -> list[int]:
    """Ids of processes started with ``variable``, NAME=value, in their environment.

    Leaves out ending processes and other users' processes, because their environment cannot be read.
    """
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, which identifies it with ``pid``; ``None`` if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _booted_at() -> float:
    """Boot of this machine by its present clock, in Unix seconds."""
    # ``btime`` of /proc/stat, which psutil adds to, is a whole second.
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


_FIRST_BOOTED_AT = _booted_at()
"""The boot by the clock of this module's import."""


def started_at(pid: int, *, earliest: bool = False) -> float | None:
    """Start of a process in Unix seconds, to a clock tick (10 ms); ``None`` if it has ended.

    Args:
        earliest: Take the earlier time if the clock has jumped since, for comparisons with times of files.
    """
    ticks, booted = start_ticks(pid), _booted_at()
    if earliest:
        booted = min(booted, _FIRST_BOOTED_AT)
    return None if ticks is None else booted + ticks / os.sysconf("SC_CLK_TCK")


def born() -> float:
    """Start of this process in Unix seconds."""
    started = started_at(os.getpid())
    assert started is not None, "this process has not ended"
    return started


def available_memory() -> int:
    """Bytes that new processes may use: the machine's available memory, or less under a cgroup limit."""
    import psutil

    memory = int(psutil.virtual_memory().available)
    limit, used, parts = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        # Page cache counts as used, but the kernel frees it on demand.
        stat = dict(line.split() for line in parts.read_text().splitlines()) if parts.is_file() else {}
        cached = sum(int(stat.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        memory = min(memory, max(0, int(text) - int(used.read_text()) + cached))
    return memory


def resident_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process (default: this one). Exact, unlike ``VmRSS``."""
    text = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Rss:")).split()[1]) * 1024


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_TEXT = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|CUDA (error: )?out of memory|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Error texts of torch's CPU allocator, the system and CUDA, and of cuBLAS and cuDNN (plain RuntimeErrors)."""
_ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, is a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _TEXT.search(str(error)):
            return True
        error = error.__cause__
    return False


def bytes_asked(error: BaseException) -> str | None:
    """Return the size that did not fit, in torch's words (``64 bytes``, ``2.00 GiB``); ``None`` if not in the text."""
    found = _ASKED.search(f"{error} {error.__cause__ or ''}")
    return None if found is None else found[1]


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the body: it takes a fifth of the time of an import, and a third of the time of
    reading rows.

    Objects that exist at the end are frozen, so later collections skip them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


log = logging.getLogger(__name__)

ALONE_S = 20.0
"""Seconds that processes may outlive their supervisor, to finish saving a checkpoint."""
LOOK_S = 1.0
"""Seconds between two checks of the parent."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec only the call itself is safe


def die_with(parent: int, number: int) -> None:
    """Ask Linux, in a child, for signal ``number`` when the thread that started it ends. A change of user cancels
    it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the prctl call
        os._exit(1)


_watched: list[float] = []
"""Seconds that this process outlives its parent; empty if the parent is not watched."""


def end_after_parent(after_s: float = ALONE_S) -> None:
    """End this process ``after_s`` after its parent's death, even if it is blocked: the reaper may be dead too.

    Forked children do the same. A second call changes nothing.
    """
    if not _watched:
        _watched.append(after_s)
        _watch()


def _watch() -> None:
    if _watched:
        threading.Thread(target=_outlive, args=(os.getppid(), *_watched), daemon=True, name="parent watch").start()


os.register_at_fork(after_in_child=_watch)  # a fork inherits no threads


def _outlive(parent: int, after_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    time.sleep(after_s)
    log.error("ending: the supervisor died %g s ago", after_s)
    os._exit(1)
