"""Seconds from the command to the first published weights, and of ``--check``, on this machine.

``python benchmarks/start.py [--rounds N] [--write]``. Each round starts the quickstart in a fresh directory, with fork
servers and without, and once more where rows and model are there; the warm start is cut to one step. The order of the
three changes from round to round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import page

from megarl.core.metrics import COMMAND
from megarl.run.report.data import load
from megarl.run.report.svg import last_start

COMMAND_LINE = (
    sys.executable, "-m", "megarl", "train", "experiment=quickstart", "trainer.steps=1", "trainer.tasks_per_step=8",
    "trainer.warm_start.steps=1", "trainer.eval_interval=1",
)  # fmt: skip
KINDS = {"first start": (), "first start, `run.fork_servers=false`": ("run.fork_servers=false",)}
PARTS = ("import", "check", "prepare", "spawn")


def started(run_dir: Path, more: Sequence[str] = ()) -> dict[str, float]:
    """Run to the end, and return the seconds of the start's parts."""
    subprocess.run(
        [*COMMAND_LINE, f"run.dir={run_dir}", *more], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found = load(run_dir).timelines
    span = last_start(found)
    assert span is not None
    begin, end = span
    seconds = {phase.name: phase.end - phase.start for phase in found[COMMAND] if phase.start >= begin}
    [engine] = [phase for phase in found["engine_0"] if phase.name == "load"][-1:]
    return {**{name: seconds[name] for name in PARTS}, "engine serves": engine.end - begin, "all": end - begin}


def check_s(run_dir: Path) -> float:
    """Seconds of ``--check``."""
    start = time.perf_counter()
    subprocess.run(
        [*COMMAND_LINE, f"run.dir={run_dir}", "--check"], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> str:
    """Median, and between brackets the least and the most."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/start.md")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    checks: dict[str, list[float]] = {"with rows and model to make": [], "where they are": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            kinds = list(KINDS.items())
            for name, more in kinds if number % 2 else reversed(kinds):
                run_dir = Path(folder, f"{number}-{len(more)}")
                found.setdefault(name, []).append(started(run_dir, more))
                if not more:
                    checks["where they are"].append(check_s(run_dir))
                    for entry in run_dir.iterdir():  # as after `megarl data`, and with the model
                        if entry.name not in ("data", "model"):
                            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                    found.setdefault("rows and model are there", []).append(started(run_dir))
                else:
                    checks["with rows and model to make"].append(check_s(Path(folder, f"check-{number}")))
                shutil.rmtree(run_dir)
    text = page.Text()
    text.say(f"Seconds, median (least-most) of {options.rounds} starts.")
    text.say("")
    names = [*PARTS, "engine serves", "all"]
    text.say(f"| | {' | '.join(names)} |")
    text.say(f"|---|{'---|' * len(names)}")
    for kind, rows in found.items():
        text.say(f"| {kind} | {' | '.join(spread([row[name] for row in rows]) for name in names)} |")
    text.say("")
    text.say("| `megarl train --check` | seconds |")
    text.say("|---|---|")
    for kind, values in checks.items():
        text.say(f"| {kind} | {spread(values)} |")
    if options.write:
        page.write("benchmarks/start.md", str(text))


if __name__ == "__main__":
    main()
