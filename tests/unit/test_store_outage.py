"""A store that is away for longer than a stall: its processes show that they wait, and go on."""

from __future__ import annotations

import ast
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import megarl
from megarl.buffer.store import Store, transactions
from megarl.core.processes import heartbeat

CHILD = """
import sys
from megarl.core.processes import heartbeat
from megarl.buffer.store import Store
heartbeat.begin()
store = Store(sys.argv[1], outage_s=300) if sys.argv[2] == "early" else None
print("ready", flush=True)
sys.stdin.readline()
store = store or Store(sys.argv[1], outage_s=300)
store.journal.record_step(1, {})
"""


@contextmanager
def child(url: str, when: str = "early") -> Iterator[tuple[subprocess.Popen[str], heartbeat.Memory]]:
    """A process that opens the store, ``early`` or only when a line of its input comes, and then records a step."""
    memory = heartbeat.Memory()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, url, when],
        env={**os.environ, heartbeat.VARIABLE: str(memory.descriptor)}, pass_fds=[memory.descriptor],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process, memory
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def shows_that_it_waits(memory: heartbeat.Memory) -> bool:
    """Its marks and its work go on: the former for the watchdog's stall, the latter for its idle explorer."""
    for _ in range(3):
        before, end = memory.read(), time.monotonic() + 30
        while (now := memory.read()).beats == before.beats or now.work == before.work:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    return True


def test_a_locked_file_is_no_stall(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    with child(f"sqlite:///{tmp_path}/store.db") as (process, memory):
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        go(process)
        assert shows_that_it_waits(memory)
        other.execute("ROLLBACK")
        assert process.wait(60) == 0
    assert [step for step, _ in store.journal.steps()] == [1]
    store.close()
    other.close()


def test_a_new_file_that_is_locked_is_no_stall(tmp_path: Path) -> None:
    with child(f"sqlite:///{tmp_path}/store.db", "late") as (process, memory):
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        go(process)
        assert shows_that_it_waits(memory)
        other.execute("ROLLBACK")
        other.close()
        assert process.wait(60) == 0


def test_every_process_of_a_job_waits_for_the_store() -> None:
    """Calls that open a store without an outage, by file."""
    found: Counter[str] = Counter()
    for path in Path(megarl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Store":
                found[path.name] += all(keyword.arg != "outage_s" for keyword in node.keywords)
    assert +found == {
        "supervisor.py": 1,  # a thread, which looks again and again by itself
        "joining.py": 1,  # an explore program that ends takes its engines out as far as it can
        "job_store.py": 1,  # tools of people
        "store_damage.py": 1,  # a file that nobody else has
    }


def test_a_process_that_was_suspended_in_an_outage_has_not_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is an hour ahead after the first try: the whole job was suspended."""
    store = Store(f"sqlite:///{tmp_path}/store.db", outage_s=200)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 2:
            other.execute("ROLLBACK")

    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 3600 * bool(sleeps), sleep=sleep)
    monkeypatch.setattr(transactions, "time", clock)
    store.journal.record_step(1, {})
    assert [step for step, _ in store.journal.steps()] == [1] and len(sleeps) == 2
    store.close()
    other.close()
