"""Seconds that a preemption with notice costs: ``python benchmarks/preemption.py [--times N] [--write]``.

Trains quickstart's model on two data-parallel ranks with a separate engine. Every few steps, at a random moment, the
job gets SIGTERM; it saves, ends with status 130, and the same command is given again at once, as by a requeue. Every
second from the first start to the end has a cause. The final weights must have the bits of a job without preemptions.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jobs
import page

from megarl.run.report.goodput import CAUSES, SecondsByCause, account_of
from megarl.weights.checkpoint.training.manifest import latest, read_manifest

LIMIT_S, LOOK_S, PREEMPTED = 600.0, 0.05, 130
"""Longest wait for a step; seconds between two looks; status of a job that has saved."""
HOUR_S, WANTED = 3600.0, 0.97
JOB = (
    "experiment=quickstart", "parallel=dp2", "trainer.checkpoint_interval=1000", "trainer.warm_start.steps=50",
    "trainer.eval_interval=0", "taskset.eval_size=20", "taskset.train_size=2000", "rollout.segment_tokens=4",
)  # fmt: skip


def preempted(run_dir: Path, settings: tuple[str, ...], times: int, every: int) -> None:
    """Train to the end with a preemption after each ``every`` steps. Raises RuntimeError if a start fails."""
    log, dice = run_dir.with_suffix(".log"), random.Random(times)
    for number in range(times + 1):
        with log.open("ab") as output:
            command = [sys.executable, "-m", "megarl", "train", *settings, f"run.dir={run_dir}"]
            process = subprocess.Popen(command, cwd=jobs.ROOT, stdout=output, stderr=output)
        try:
            if number < times:
                _until(process, run_dir, every * (number + 1))
                begun = time.monotonic()
                _until(process, run_dir, every * (number + 1) + 1)
                time.sleep(dice.uniform(0.0, time.monotonic() - begun))
                process.send_signal(signal.SIGTERM)
            status = process.wait(LIMIT_S)
        finally:
            process.kill()
        if status != (PREEMPTED if number < times else 0):
            raise RuntimeError(f"start {number + 1} ended with status {status} ({log})")
        print(f"start {number + 1}: {jobs.steps_done(run_dir)} steps", flush=True)


def _until(process: subprocess.Popen[bytes], run_dir: Path, steps: int) -> None:
    end = time.monotonic() + LIMIT_S
    while jobs.steps_done(run_dir) < steps:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the job does not make step {steps} ({run_dir.with_suffix('.log')})")
        time.sleep(LOOK_S)


def text_of(spent: SecondsByCause, times: int, every: int) -> str:
    """Return the page's text: causes of the whole run, and of each preemption."""
    found = spent.notices()
    lost = [sum(one.values()) for one in found]
    causes = [cause for cause in CAUSES if any(cause in one for one in found)]
    lines = ["| cause | meaning | seconds | share |", "|---|---|--:|--:|"]
    lines += [
        f"| {cause} | {CAUSES[cause]} | {seconds:.1f} | {seconds / spent.wall_s:.1%} |"
        for cause, seconds in spent.seconds.items()
    ]
    lines += [f"| **all** | | {sum(spent.seconds.values()):.1f} | wall time {spent.wall_s:.1f} |", ""]
    lines += [f"| preemption | {' | '.join(causes)} | all |", "|--:|" + "--:|" * (len(causes) + 1)]
    rows = [(str(i + 1), one) for i, one in enumerate(found)]
    median = {cause: statistics.median(one.get(cause, 0.0) for one in found) for cause in causes}
    lines += [
        f"| {name} | {' | '.join(f'{one.get(cause, 0.0):.1f}' for cause in causes)} | {sum(one.values()):.1f} |"
        for name, one in rows
    ]
    middle, largest = statistics.median(lost), max(lost)
    lines += [f"| median | {' | '.join(f'{median[cause]:.1f}' for cause in causes)} | {middle:.1f} |", ""]
    lines.append(
        f"{times} preemptions, one after each {every} steps, at a random moment of a step. A preemption costs all "
        f"seconds between the last kept step before it and the next one: {middle:.1f} s in the median, {largest:.1f} s "
        f"at most. At one an hour the goodput is {1 - middle / HOUR_S:.2%} (with the largest "
        f"{1 - largest / HOUR_S:.2%}; wanted {WANTED:.0%}). The final weights equal those of a job without "
        "preemptions, bit for bit."
    )
    return "\n".join(lines)


def same_weights(one: Path, other: Path) -> bool:
    """Return True if the newest checkpoints of two runs have equal files."""
    files = []
    for run_dir in (one, other):
        checkpoint = latest(run_dir / "checkpoints")
        assert checkpoint is not None
        digests = read_manifest(checkpoint)["files"]
        files.append({name: found for name, found in digests.items() if name.endswith(".distcp")})
    return bool(files[0]) and files[0] == files[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="preemptions")
    parser.add_argument("--every", type=int, default=30, help="steps between two preemptions")
    parser.add_argument("--write", action="store_true", help="to docs/benchmarks/preemption.md")
    parser.add_argument("--dir", help="folder of the runs, kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        settings = (*JOB, f"trainer.steps={given.every * (given.times + 1)}")
        preempted(folder / "preempted", settings, given.times, given.every)
        spent = account_of(folder / "preempted")
        assert spent is not None
        text = text_of(spent, given.times, given.every)
        print(text, flush=True)
        jobs.train(folder / "whole", settings)
        if not same_weights(folder / "preempted", folder / "whole"):
            raise RuntimeError("the final weights are others than those of a job without preemptions")
    if given.write:
        page.write("benchmarks/preemption.md", text)


if __name__ == "__main__":
    main()
