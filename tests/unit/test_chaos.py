"""Faults of jobs that are disturbed for hours: their order, their account and the clocks that they turn."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.chaos import PAGE, compared
from tests.system.chaos_account import EQUAL, RECOVERED, Account, FaultRow, LifeRow, table, with_table
from tests.system.chaos_ground import STEPS
from tests.system.chaos_kinds import KINDS, drawn
from tests.system.shims import Shim


def fault(kind: str, seconds: float, life: int = 1, outcome: str = RECOVERED) -> FaultRow:
    return FaultRow(life, kind, "node 1", "rollout", 3, seconds, outcome)


def test_a_seed_has_the_same_faults_again_and_each_kind_equally_often() -> None:
    faults = list(itertools.islice(drawn("1 1"), 3 * len(KINDS)))
    assert faults == list(itertools.islice(drawn("1 1"), 3 * len(KINDS)))
    assert faults != list(itertools.islice(drawn("1 2"), 3 * len(KINDS)))
    assert all(sum(one.kind == kind for one in faults) == 3 for kind in KINDS)
    assert {one.hurried for one in faults} == {True, False}


def test_the_account_adds_up_over_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "account.jsonl"
    first = Account(path)
    assert first.rows() == [] and first.next_life() == 1
    rows: list[FaultRow | LifeRow] = [
        fault("disk full", 4.0),
        fault("disk full", 8.0),
        LifeRow(1, 1800.0, 3, 99, EQUAL),
    ]
    for row in rows:
        first.add(row)
    with path.open("a") as file:
        file.write('{"what": "FaultRow", "li\n')  # killed while it wrote
    second = Account(path)
    assert second.next_life() == 2
    second.add(fault("disk full", 900.0, life=2, outcome="no step"))
    second.add(fault("reaper: SIGKILL", 2.0, life=2))
    second.add(LifeRow(2, 3600.0, 1, 99, "1 of 99 values differ"))
    assert second.rows()[:3] == rows and len(second.rows()) == 6 and second.next_life() == 3
    text = table(second.rows(), list(KINDS))
    assert "| disk full | 3 | 2 | 6 | 8 |" in text and "| reaper: SIGKILL | 1 | 1 | 2 | 2 |" in text
    assert "| disk slow | 0 | 0 | – | – |" in text and "| **all** | 4 | 3 | 4 | 8 |" in text
    assert "2 jobs in 1.5 hours with 4 starts" in text and "1 equal the undisturbed job, 1 do not" in text


def test_the_table_is_replaced_and_the_text_around_it_stays() -> None:
    page = with_table(PAGE.read_text(), table([fault("disk full", 4.0)], list(KINDS)))
    assert with_table(page, "other\n").count("disk full") == PAGE.read_text().partition("<!-- chaos")[0].count(
        "disk full"
    )
    assert with_table(with_table(page, "other\n"), table([fault("disk full", 4.0)], list(KINDS))) == page
    with pytest.raises(ValueError, match="no <!-- chaos: begin"):
        with_table("# Soak\n", "")


def test_values_of_a_checkpoint_that_only_one_job_has_are_left_out() -> None:
    whole = {f"global_step_{STEPS}/a.distcp": "1", "global_step_2/a.distcp": "2", "metrics of step 1": {"loss": 0.5}}
    more = {**whole, "global_step_3/a.distcp": "3"}
    assert compared(more, whole) == compared(whole, more) == []
    assert compared({**more, "metrics of step 1": {"loss": 0.25}}, whole) == ["metrics of step 1"]
    assert compared({**more, "global_step_2/a.distcp": "4"}, whole) == ["global_step_2/a.distcp"]
    assert compared({"metrics of step 1": {"loss": 0.5}}, whole) == [f"global_step_{STEPS}"]


CLOCK = """
import sys, threading, time
for line in sys.stdin:
    threading.Event().wait(0.01)
    print(time.time(), time.monotonic(), flush=True)
"""


def test_a_clock_jumps_while_a_process_runs_and_waits_do_not(tmp_path: Path) -> None:
    shim = Shim(tmp_path, "a")
    with subprocess.Popen(
        [sys.executable, "-c", CLOCK], env=shim.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def look() -> tuple[float, float]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            shifted, monotonic = map(float, process.stdout.readline().split())
            return shifted - time.time(), monotonic - time.monotonic()

        for jump in (0, 1e6, -1e6):
            shim.jump(jump)
            ahead, since_boot = look()
            assert abs(ahead - jump) < 1e5 and abs(since_boot) < 1e5
        process.stdin.close()


def test_writes_to_a_slow_disk_arrive(tmp_path: Path) -> None:
    shim = Shim(tmp_path, "a")
    shim.slow(1, tmp_path)
    code = f"import os; f = open({str(tmp_path / 'file')!r}, 'w'); f.write('whole'); f.flush(); os.fsync(f.fileno())"
    assert subprocess.run([sys.executable, "-c", code], env=shim.environment).returncode == 0
    assert (tmp_path / "file").read_text() == "whole"
