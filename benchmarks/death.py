"""Seconds that the death of a trainer rank costs: ``python benchmarks/death.py [--kills N] [--write]``.

Trains quickstart's model on two data-parallel ranks with a separate engine, a checkpoint at each step. Ranks are killed
by SIGKILL at random moments, at least two steps after the last one. Engines and explorers must keep their processes.
The final weights must have the bits of a job without kills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import jobs
import page
import psutil

from megarl.core.processes import heartbeat

EVERY, LIMIT_S, LOOK_S = 3, 300.0, 0.01
"""Steps for each kill; longest wait for a step; seconds between two looks."""
JOB = (
    "experiment=quickstart", "parallel=dp2", "trainer.checkpoint_interval=1", "trainer.warm_start.steps=50",
    "trainer.eval_interval=0", "taskset.eval_size=20", "taskset.train_size=2000", "cluster.restarts=1000",
)  # fmt: skip
STAGES = ("noticed", "new ranks", "resumed", "next step")
"""What is seen after a kill, in order."""


def processes(root: psutil.Process, module: str) -> dict[str, psutil.Process]:
    """Return the processes of a job that run a module, by their ``RANK`` or their number; forks of them are left
    out."""
    found: dict[str, psutil.Process] = {}
    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            parent = process.parent()
            if f"-m {module}" in " ".join(process.cmdline()) and (
                parent is None or f"-m {module}" not in " ".join(parent.cmdline())
            ):
                found[process.environ().get("RANK", "0")] = process
    return found


class Killed:
    """A job whose ranks are killed while it trains."""

    def __init__(self, run_dir: Path, kills: int) -> None:
        self._run_dir, self._log, self._kills = run_dir, run_dir.with_suffix(".log"), kills
        self._dice = random.Random(kills)
        self.rows: list[tuple[str, dict[str, float]]] = []
        """(phase, stage -> seconds after the kill) of each kill."""
        self.step_s: list[float] = []
        """Seconds between two steps that lost nothing."""

    def run(self, settings: tuple[str, ...]) -> None:
        """Train to the end. Raises RuntimeError if the job fails or an engine or explorer is another one."""
        with self._log.open("wb") as output:
            command = [sys.executable, "-m", "megarl", "train", *settings, f"run.dir={self._run_dir}"]
            process = subprocess.Popen(command, cwd=jobs.ROOT, stdout=output, stderr=output)
        root = psutil.Process(process.pid)
        try:
            self._until(process, lambda: jobs.steps_done(self._run_dir) >= 1)
            kept = self._others(root)
            while len(self.rows) < self._kills and process.poll() is None:
                self._kill(process, root)
                if self._others(root) != kept:
                    raise RuntimeError(f"other processes than trainer ranks were started again ({self._log})")
            if process.wait(LIMIT_S):
                raise RuntimeError(f"the job ended with status {process.returncode} ({self._log})")
        finally:
            process.kill()

    def _others(self, root: psutil.Process) -> list[int]:
        modules = ("megarl.engines.server.server", "megarl.run.start explorer")
        return [one.pid for module in modules for one in processes(root, module).values()]

    def _kill(self, process: subprocess.Popen[bytes], root: psutil.Process) -> None:
        done = jobs.steps_done(self._run_dir)
        for _ in range(EVERY - 1):
            begun, done = time.monotonic(), done + 1
            self._until(process, lambda done=done: jobs.steps_done(self._run_dir) >= done)  # type: ignore[misc]
            self.step_s.append(time.monotonic() - begun)
        time.sleep(self._dice.uniform(0.0, self.step_s[-1]))
        ranks = processes(root, "megarl.run.start trainer")
        victim = ranks[str(self._dice.randrange(2))]
        phase = heartbeat.Memory.of(victim.pid).read().phase
        said, steps = self._log.stat().st_size, jobs.steps_done(self._run_dir)
        os.kill(victim.pid, signal.SIGKILL)
        killed, old = time.monotonic(), {one.pid for one in ranks.values()}
        seen: dict[str, Callable[[], bool]] = {
            "noticed": lambda: "starting the trainer ranks again" in self._since(said),
            "new ranks": lambda: not old & {one.pid for one in processes(root, "megarl.run.start trainer").values()},
            "resumed": lambda: "resumed from" in self._since(said),
            "next step": lambda: jobs.steps_done(self._run_dir) > steps,
        }
        found = {}
        for stage in STAGES:
            self._until(process, seen[stage])
            found[stage] = time.monotonic() - killed
        self.rows.append((phase, found))
        print(phase, {stage: round(seconds, 2) for stage, seconds in found.items()}, flush=True)

    def _since(self, place: int) -> str:
        with self._log.open("rb") as file:
            file.seek(place)
            return file.read().decode(errors="replace")

    def _until(self, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the job makes no step any more ({self._log})")
            time.sleep(LOOK_S)


def table(rows: list[tuple[str, dict[str, float]]]) -> list[str]:
    """Return a row for each phase, and one for all: kills, median of each stage, largest total."""
    by_phase: dict[str, list[Mapping[str, float]]] = {}
    for phase, found in rows:
        by_phase.setdefault(phase, []).append(found)
    by_phase = dict(sorted(by_phase.items())) | {"**all**": [found for _, found in rows]}
    lines = [f"| killed in | kills | {' | '.join(STAGES)} | largest |", "|---|--:|" + "--:|" * (len(STAGES) + 1)]
    for phase, found in by_phase.items():
        medians = [f"{statistics.median(one[stage] for one in found):.1f}" for stage in STAGES]
        lines.append(f"| {phase} | {len(found)} | {' | '.join(medians)} | {max(o['next step'] for o in found):.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="write into docs/benchmarks/death.md")
    args = parser.parse_args()
    text = page.Text()
    with tempfile.TemporaryDirectory() as folder:
        settings = (*JOB, f"trainer.steps={(args.kills + 1) * (EVERY + 1)}")  # a step may end just before its kill
        killed = Killed(Path(folder) / "killed", args.kills)
        killed.run(settings)
        jobs.train(Path(folder) / "whole", settings)
        weights = [(Path(folder) / name / "hf" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    for line in table(killed.rows):
        text.say(line)
    same = "equal" if weights[0] == weights[1] else "**differ from**"
    text.say("")
    text.say(
        f"Median seconds after the kill. A step takes {statistics.median(killed.step_s):.1f} s. No engine and no "
        f"explorer was started again. The final weights {same} those of a job without kills, bit for bit."
    )
    if args.write:
        page.write("benchmarks/death.md", str(text))


if __name__ == "__main__":
    main()
