"""Faults done to a running job, one after the other; docs/faults.md is made from what happened.

    python -m tests.system.fault_table [--dir runs/faults] [--only WORD]… [--steps N] [hydra overrides]    # writes the
    table to <dir>/table.md

One job trains while every fault is done to it, each two or more steps after the one before; where a fault ends the
command, the same command is given again. At its end its checkpoints, metrics, tasks, answers, log-probs and rewards are
compared with those of a job that was left alone. Weight syncs and PostgreSQL have a job of their own, and so has each
fault that changes the result by intent (an update left out, a step taken back). As root the job's directory is a file
system of its own, which one fault fills.

*Seconds*: from the fault until a step that had not been recorded is, repeated steps included.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.loop.held import Held
from tests.system.injected import EVERY, FAULTS, IN_SYNCS, OF_POSTGRES, OF_SYNCS, Fault, Injured, disk_filled
from tests.system.jobs import TINY, Job
from tests.system.soak import END_S, checkpoints_and_metrics, found_in, run_to_its_end

STEPS_APART = 3
"""Steps between two faults: a checkpoint lies between them."""
BASE = (
    *TINY,
    "parallel=dp2",
    "rollout.replicas=2",
    "algorithm.group_size=8",
    f"trainer.checkpoint_interval={EVERY}",
    "trainer.keep_checkpoints=1000",
    "trainer.eval_interval=0",
    "cluster.restarts=9",
    "cluster.replacements=99",
    "cluster.stall_s=15",
)


@dataclass
class Row:
    fault: str
    moment: str
    happened: str
    seconds: float
    attempts: int
    """Attempts beyond the one that was hurt."""


COUNTS = re.compile(r"checkpoint/failed$|reward/\w+/(kills|retries)$")
"""Metrics that count checkpoints without room, and reward processes that were killed."""
NAN = "NaN in one rank's loss"
SPOILED = """
import dataclasses, os
from megarl.learn.algorithms.group_relative import GRPO

CALLS = 0

def loss(batch, config):
    global CALLS
    found = GRPO.loss(batch, config)
    if batch.logp.requires_grad and os.environ.get("RANK") == "1":
        CALLS += 1
        if CALLS == 11:
            found = found._replace(total=found.total * float("nan"))
    return found

ALGORITHM = dataclasses.replace(GRPO, name="spoiled", loss=loss)
"""


def suffer(faults: Sequence[Fault], run_dir: Path, overrides: Sequence[str], held: Held) -> list[Row]:
    """All faults done to one job, which then trains to its end."""
    injured = Injured(run_dir, overrides, held)
    rows = []
    try:
        for fault in faults:
            injured.behind_a_step()
            injured.behind_a_step()
            fault.moment(injured)
            job, step, attempt, since = injured.job, injured.step(), injured.attempt(), time.monotonic()
            happened = fault.do(injured)
            injured.let_go()
            if injured.job is not job:  # what ended may have recorded one more
                step = injured.step()
            injured.job.until(
                lambda step=step: injured.step() > step, f"a step behind {step}, after {fault.name}", poll_s=0.01
            )  # type: ignore[misc]
            row = Row(
                fault.name,
                fault.moment.__name__.replace("_", " "),
                happened,
                time.monotonic() - since,
                injured.attempt() - attempt,
            )
            rows.append(row)
            print(
                f"step {step}: {row.fault}, {row.moment}: {row.seconds:.1f} s, {row.attempts} new attempts", flush=True
            )
        if injured.job.wait(END_S) != 0:
            raise SystemExit(f"{run_dir}: the job ended with {injured.job.poll()}; see {injured.job.output}")
    finally:
        injured.job.clean_up()
    return rows


def spoil(root: Path, action: str, happened: str) -> Row:
    """A job in which one rank's loss is once not finite; the seconds are from then to the end of that step, or of the
    one done in its place."""
    run_dir, algorithm = root / f"spoiled_{action}", root / "spoiled.py"
    algorithm.write_text(SPOILED)
    shutil.rmtree(run_dir, ignore_errors=True)
    run_to_its_end(
        run_dir,
        [*BASE, "trainer.steps=8", f"algorithm.name={algorithm}", f"trainer.update_filter.on_nonfinite={action}"],
    )
    store = Job(run_dir, [])
    ((at, data),) = store.query("select at, data from events where kind = 'bad_update'")
    ((then,),) = store.query(f"select min(recorded_at) from steps where recorded_at > {at}")
    assert isinstance(at, float) and isinstance(then, float)
    print(f"NaN, {action}: {then - at:.1f} s, {data}", flush=True)
    return Row(
        NAN,
        f"`trainer.update_filter.on_nonfinite={action}`",
        happened,
        then - at,
        int((run_dir / "attempt").read_text()) - 1,
    )


def compared(hurt: Path, whole: Path, steps: int) -> tuple[str, list[str]]:
    """What differs from the job without faults. A checkpoint that only one of them has is said apart: a stop saves one,
    a full disk prevents one."""
    found, reference = (without_counts(found_in(run, steps)) for run in (hurt, whole))
    ours, theirs = ({path.name for path in (run / "checkpoints").glob("global_step_*")} for run in (hurt, whole))
    differing = sorted(
        name
        for name in found.keys() | reference.keys()
        if found.get(name) != reference.get(name) and name.partition("/")[0] not in ours ^ theirs
    )
    named = "; ".join(f"{name}: {_difference(found.get(name), reference.get(name))}" for name in differing)
    text = f"{len(reference)} things compared, {len(differing)} differ{named and f' ({named})'}"
    return f"{text}; checkpoints left out: {sorted(theirs - ours)}, more than usual: {sorted(ours - theirs)}", differing


def without_counts(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out the metrics that count the faults themselves."""
    return {
        name: {key: number for key, number in value.items() if not COUNTS.match(key)}
        if isinstance(value, dict)
        else value
        for name, value in found.items()
    }


def _difference(found: Any, reference: Any) -> str:
    """Of metrics, which."""
    if isinstance(found, dict) and isinstance(reference, dict):
        return ", ".join(sorted(key for key in found.keys() | reference.keys() if found.get(key) != reference.get(key)))
    return "not there" if found is None else "only there" if reference is None else "another value"


def compared_without_store(hurt: Path, whole: Path) -> tuple[str, list[str]]:
    """Weights, moments and metrics of two runs; a job's own PostgreSQL ends with it."""
    found, reference = (
        {name: value for name, value in checkpoints_and_metrics(run).items() if not name.startswith("metrics of val")}
        for run in (hurt, whole)
    )
    differing = sorted(name for name in found.keys() | reference.keys() if found.get(name) != reference.get(name))
    return (
        f"{len(reference)} things compared (no answers: the server is gone), {len(differing)} differ "
        f"{differing[:5] or ''}",
        differing,
    )


def table(rows: Sequence[Row]) -> str:
    lines = ["| fault | during | recovery | seconds |", "|---|---|---|--:|"]
    for row in rows:
        attempts = f"; {row.attempts} attempts" if row.attempts > 1 else ""
        lines.append(f"| {row.fault} | {row.moment} | {row.happened}{attempts} | {row.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def chosen(faults: Sequence[Fault], words: Sequence[str]) -> list[Fault]:
    """Those whose name and moment contain one of the words; all without words."""
    return [
        fault
        for fault in faults
        if not words or any(word in f"{fault.name}, {fault.moment.__name__}" for word in words)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/faults"))
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="rows with one of these words; repeatable"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=(len(FAULTS) + 1) * (STEPS_APART + 1),
        help=f"{STEPS_APART + 1} for each fault of a job, and as many more",
    )
    arguments, overrides = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no job is left behind
    root, steps, only = arguments.dir.resolve(), arguments.steps, arguments.only
    root.mkdir(parents=True, exist_ok=True)
    held = Held(root)
    settings = [*held.settings, *BASE, f"trainer.steps={steps}", *overrides]
    whole, hurt, of_syncs, of_postgres = root / f"whole_{steps}", root / "hurt", root / "syncs", root / "postgres"
    if not (whole / "hf" / "config.json").is_file():
        run_to_its_end(whole, settings)
    rows: list[Row] = []
    verdicts: list[str] = []
    differing: list[str] = []

    def verdict(of: str, text: str, found: list[str]) -> None:
        verdicts.append(f"{of}: {text}")
        differing.extend(found)
        print(verdicts[-1], flush=True)

    if faults := chosen(FAULTS, only):
        shutil.rmtree(hurt, ignore_errors=True)
        hurt.mkdir()
        with own_file_system(hurt) as alone:
            rows += suffer([fault for fault in faults if alone or fault.do is not disk_filled], hurt, settings, held)
            verdict("the job of all faults on SQLite", *compared(hurt, whole, steps))
    if faults := chosen(OF_SYNCS, only):
        shutil.rmtree(of_syncs, ignore_errors=True)
        rows += suffer(faults, of_syncs, [*settings, IN_SYNCS], held)
        verdict("the job of faults in syncs", *compared(of_syncs, whole, steps))
    if faults := chosen(OF_POSTGRES, only):
        shutil.rmtree(of_postgres, ignore_errors=True)
        rows += suffer(faults, of_postgres, [*settings, "store=postgres"], held)
        verdict("the job on PostgreSQL", *compared_without_store(of_postgres, whole))
    if not only or any(word in NAN for word in only):
        rows += [
            spoil(root, "skip", "the update is left out on all ranks"),
            spoil(root, "rollback", "back to the newest checkpoint, in process; other tasks"),
        ]
    (root / "table.md").write_text(table(rows) + "".join(f"\n{text}" for text in verdicts) + "\n")
    print((root / "table.md").read_text())
    sys.exit(1 if differing else 0)


@contextmanager
def own_file_system(folder: Path) -> Iterator[bool]:
    """Mount one on ``folder`` where this user may; False where not."""
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2g", "none", str(folder)], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    main()
