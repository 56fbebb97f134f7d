"""Jobs on two simulated nodes under random faults, each compared to the bit with one that was left alone.

    python -m tests.system.chaos [--minutes 120] [--seed 1] [--dir runs/chaos] [--only WORD]… [--write]

A *life* is a small GRPO job on PostgreSQL from its first start to its end. At random moments one fault after the other
is done to it (``chaos_kinds.KINDS``), most of them once a step was committed after the one before. A command that a
kill or a preemption has ended is given again, as a cluster's queue would do it; any other end is a failure. At its end
the job must equal the undisturbed job in checkpoints, metrics, tasks, answers, log-probs, rewards and groups of each
step. No process, shared memory or temporary file may be left.

``account.jsonl`` in ``--dir`` has a line for each fault and each life. The same command goes on with the next life, and
runs add up. After a failure the life's directory stays, with its logs. ``--write`` puts the table into docs/soak.md.

Needs root: each node is a network namespace with a clock of its own, and the run's directory is a disk of its own.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.durable import write_text
from tests.parts import ROOT, git
from tests.system.chaos_account import EQUAL, RECOVERED, Account, FaultRow, LifeRow, table, with_table
from tests.system.chaos_ground import LOOK_S, SETTINGS, STEPS, ChaosError, ChaosJob, Ground
from tests.system.chaos_kinds import KINDS, Absent, Drawn, drawn

RECOVER_S, GAP_S = 900.0, 12.0
"""Longest time without a new step; most seconds from that step to the next fault."""
PAGE = ROOT / "docs" / "soak.md"


class Injected(NamedTuple):
    """A fault that no step has followed yet."""

    fault: Drawn
    detail: str
    phase: str
    step: int
    begun: float


class Life:
    """A job and the faults that are done to it."""

    def __init__(self, number: int, job: ChaosJob, account: Account) -> None:
        self.number, self._job, self._account = number, job, account
        self._open: list[Injected] = []
        self._newest = 0, time.monotonic()
        """Newest step, and the moment at which it was first seen."""

    def run(self, faults: Iterator[Drawn], until: float) -> None:
        """Run the job to its end under faults, of which none is begun after ``until``. Raises ChaosError."""
        self._job.start()
        waits = True
        for fault in faults:
            if waits and not self._until_step():
                return
            if time.monotonic() > until or not self._rests(fault.gap * GAP_S):
                break
            waits = not self._inject(fault) or not fault.hurried
        while self._goes_on():
            self._until_step()
            time.sleep(LOOK_S)

    def _inject(self, fault: Drawn) -> bool:
        """Do a fault; False if there is nothing to do it to."""
        begun, phase, step = time.monotonic(), self._job.phase(), self._job.done()
        print(f"life {self.number}, step {step}, {phase}: {fault.kind}", flush=True)
        try:
            detail = KINDS[fault.kind](self._job, fault)
        except Absent:
            return False
        except ChaosError as error:
            self._open.append(Injected(fault, "", phase, step, begun))
            self._close(str(error))
            raise
        self._open.append(Injected(fault, detail, phase, step, begun))
        return True

    def _rests(self, seconds: float) -> bool:
        """Let the job run for a while; False if it has ended well."""
        end = time.monotonic() + seconds
        while self._goes_on() and time.monotonic() < end:
            time.sleep(LOOK_S)
        return self._job.status() is None

    def _until_step(self) -> bool:
        """Wait for a step after all faults so far; False if the job has ended well."""
        least = max((one.step for one in self._open), default=0)
        while self._job.done() <= least:
            if not self._goes_on():
                return False
            time.sleep(LOOK_S)
        self._close(RECOVERED)
        return True

    def _goes_on(self) -> bool:
        """Start the job again if need be; False if it has ended well. Raises ChaosError if it fails or hangs."""
        if (step := self._job.done()) != self._newest[0]:
            self._newest = step, time.monotonic()
        try:
            goes_on = self._job.go_on()
            if goes_on and time.monotonic() - self._newest[1] > RECOVER_S:
                raise ChaosError(f"no step after {step} within {RECOVER_S:.0f} s ({self._job.logs})")
        except ChaosError as error:
            self._close(str(error))
            raise
        if not goes_on:
            self._close(RECOVERED)
        return goes_on

    def _close(self, outcome: str) -> None:
        """Write the open faults into the account."""
        for one in self._open:
            seconds = round(time.monotonic() - one.begun, 1)
            row = FaultRow(self.number, one.fault.kind, one.detail, one.phase, one.step, seconds, outcome)
            self._account.add(row)
            print(f"  {seconds:.0f} s: {one.fault.kind}, {one.detail}: {outcome}", flush=True)
        self._open.clear()


def reference(ground: Ground) -> dict[str, Any]:
    """Return what the undisturbed job leaves; it is kept for these sources and settings."""
    path = ground.folder / "whole.json"
    what = [git("rev-parse", "HEAD:megarl"), SETTINGS]
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if kept.get("of") == what:
        return dict(kept["found"])
    job = ChaosJob(ground, "whole")
    try:
        job.start()
        while (status := job.status()) is None:
            time.sleep(LOOK_S)
        job.until_ended("the end")
        if status != 0 or job.left_over():
            raise ChaosError(f"the undisturbed job: status {status}, left over: {job.left_over()} ({job.logs})")
        found = json.loads(json.dumps(job.found()))
    finally:
        job.close(keep=False)
    write_text(path, json.dumps({"of": what, "found": found}))
    return dict(found)


def compared(found: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Return the names of what differs. A stop saves a checkpoint more, a full disk prevents one."""
    ours, theirs = ({name.partition("/")[0] for name in of if "/" in name and name.startswith("global_step")}
                    for of in (found, whole))  # fmt: skip
    if (last := f"global_step_{STEPS}") not in ours & theirs:
        return [last]
    names = sorted(name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name))
    return [name for name in names if name.partition("/")[0] not in ours ^ theirs]


def live(ground: Ground, account: Account, seed: int, only: Sequence[str], until: float) -> None:
    """Run a life and write its row. Raises ChaosError, after which the run's directory and its logs are kept."""
    whole, number, begun = reference(ground), account.next_life(), time.monotonic()
    job, failure, found = ChaosJob(ground, f"life_{number}"), None, dict[str, Any]()
    faults = (one for one in drawn(f"{seed} {number}") if not only or any(word in one.kind for word in only))
    try:
        Life(number, job, account).run(faults, until)
        if left := job.left_over():
            raise ChaosError(f"left over: {left}")
        found = json.loads(json.dumps(job.found()))
        if differing := compared(found, whole):
            write_text(job.logs / "found.json", json.dumps(found))
            raise ChaosError(f"{len(differing)} of {len(whole)} values differ: {differing[:5]}")
    except ChaosError as error:
        failure = f"{error}; seed {seed}, logs {job.logs}"
        raise
    finally:
        if failure is not None or found:
            outcome = failure or EQUAL
            account.add(LifeRow(number, round(time.monotonic() - begun, 1), job.starts, len(whole), outcome))
            print(f"life {number}: {job.starts} starts, {outcome}", flush=True)
        job.close(keep=failure is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="after so many no fault begins, and no life")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="kinds with a word; repeatable")
    parser.add_argument("--write", action="store_true", help="write the table of all runs into docs/soak.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no job is left behind
    account, until = Account(given.dir.resolve() / "account.jsonl"), time.monotonic() + given.minutes * 60
    failure = ""
    if given.minutes:
        ground = Ground(given.dir.resolve())
        try:
            while time.monotonic() < until:
                live(ground, account, given.seed, given.only, until)
        except ChaosError as error:
            failure = str(error)
        finally:
            ground.close()
    text = table(account.rows(), list(KINDS))
    print(text)
    if given.write:
        write_text(PAGE, with_table(PAGE.read_text(), text))
    print(failure or text.strip().splitlines()[-1])
    sys.exit(1 if failure else 0)


if __name__ == "__main__":
    main()
