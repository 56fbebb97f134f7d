"""CPU-seconds of each test, processes that it starts included: ``pytest -p tests.cpu_seconds``.

With ``MEGARL_CPU_SECONDS=FILE`` a line of JSON a test is added to that file: its name, seconds of CPU, of the clock.
``python -m tests.cpu_seconds FILE`` prints sums by folder and file, and the tests that took most.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
SHOWN = 60
"""Tests and files that are printed."""


def cpu_seconds(root: int) -> float:
    """CPU-seconds of a process and all below it, those that it has waited for included."""
    ticks = 0
    below = [root]
    while below:
        pid = below.pop()
        below += children(pid)
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and both of children that were waited for
    return ticks * TICK_S


def children(pid: int) -> list[int]:
    """Processes that the threads of a process have started."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


class Spent:
    """Writes what each test has taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._me = psutil.Process().pid
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes whose parent has ended count too
        self._before = (0.0, time.monotonic())

    def _record(self, name: str) -> None:
        now = (cpu_seconds(self._me), time.monotonic())
        cpu, wall = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        with self._path.open("a") as lines:
            lines.write(json.dumps({"test": name, "cpu_s": round(cpu, 3), "wall_s": round(wall, 3)}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._record(f"collection of {session.testscollected}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._record(nodeid)

    def pytest_sessionfinish(self) -> None:
        self._record("end")


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("MEGARL_CPU_SECONDS"):
        config.pluginmanager.register(Spent(Path(path)))


def read(path: Path) -> list[dict]:
    """Lines that ``Spent`` has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def sums(rows: Iterable[dict], by: Literal["folder", "file", "test"]) -> dict[str, tuple[float, float, int]]:
    """Seconds of CPU and of the clock, and the number of tests, of each folder, file or test."""
    found: dict[str, tuple[float, float, int]] = defaultdict(lambda: (0.0, 0.0, 0))
    for row in rows:
        file = row["test"].partition("::")[0]
        name = {"folder": file.rpartition("/")[0] or file, "file": file, "test": row["test"]}[by]
        cpu, wall, number = found[name]
        found[name] = (cpu + row["cpu_s"], wall + row["wall_s"], number + 1)
    return found


def main(path: str) -> None:
    rows = read(Path(path))
    for by in ("folder", "file", "test"):
        print(f"\nCPU s   clock s   tests  {by}")
        for name, (cpu, wall, number) in sorted(sums(rows, by).items(), key=lambda item: -item[1][0])[:SHOWN]:
            print(f"{cpu:7.1f} {wall:8.1f} {number:7.0f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1])
