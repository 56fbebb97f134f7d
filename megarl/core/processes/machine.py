"""This machine: its process groups, and the memory that new processes may use (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Control group of this process: a container sees its own here."""
KILLS = 200
"""Most rounds of killing processes that start others."""
KILLED_S = 0.01
"""Seconds that killed processes get to end before it is looked whether others are left."""


def group_members(group: int) -> list[int]:
    """Process ids of a process group and of the session with its number; left out are those of which only a zombie is
    left (Linux)."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The command in parentheses may hold spaces: state, parent, group and session follow the last ")".
                state, _, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                # Of a process that is killed the first thread is a zombie at once; the last one gives back its memory,
                # and only then closes the sockets on which others of the group may have listened.
                if str(group) in numbers and (state != "Z" or len(list((entry / "task").iterdir())) > 1):
                    members.append(int(entry.name))
    return members


def kill_group(group: int) -> None:
    """SIGKILL to a process group, and to the groups that its processes have made in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for pid in group_members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_marked(variable: str) -> None:
    """SIGKILL to all processes that were started with an environment in which ``variable``, NAME=value, is.

    It finds those that have left their session, too. Repeated while it finds any, since they may start others.
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
    """Processes that were started with an environment in which ``variable``, NAME=value, is.

    Those that end just now are left out, and those whose environment may not be read: they are another user's.
    """
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def start_ticks(pid: int) -> int | None:
    """Start of a process, in clock ticks since the boot, which with ``pid`` names it; None when it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def started_at(pid: int) -> float | None:
    """Start of a process, in Unix seconds; None when it is gone."""
    booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    ticks = start_ticks(pid)
    return None if booted is None or ticks is None else int(booted[1]) + ticks / os.sysconf("SC_CLK_TCK")


def available_memory() -> int:
    """Bytes that processes started now may use: the machine's, or less where a cgroup limits this one."""
    import psutil

    memory = int(psutil.virtual_memory().available)
    limit, used, parts = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        # What files left in the page cache counts as used, and the kernel gives it back when somebody asks.
        stat = dict(line.split() for line in parts.read_text().splitlines()) if parts.is_file() else {}
        cached = sum(int(stat.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        memory = min(memory, max(0, int(text) - int(used.read_text()) + cached))
    return memory


def resident_bytes(pid: int | None = None) -> int:
    """Bytes of a process that are in memory, this one's without ``pid``. Exact, unlike ``VmRSS``."""
    text = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Rss:")).split()[1]) * 1024


def trim_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps what came in small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
