"""Seconds per phase of the quickstart, and what each process waited for.

Runs the experiment twice with few steps: a first run that makes model and data, and a second one that only starts (its
time to the first rollout is the start-up a user sees). Prints a Markdown report and writes it to
``docs/benchmarks/loop.md``.

    python benchmarks/loop.py [--steps N] [hydra overrides]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import page

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("sync", "rollout", "batch", "inference", "update", "checkpoint")


def phases(run_dir: Path, process: str) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "timeline" / f"{process}.jsonl").read_text().splitlines()]


def total(records: list[dict], name: str) -> float:
    return sum(r["seconds"] for r in records if r["phase"] == name)


def run(name: str, steps: int, overrides: list[str]) -> tuple[Path, float, float]:
    """(run directory, wall-clock start, seconds of the whole command)."""
    run_dir = ROOT / "runs" / name
    started = time.time()
    command = [
        sys.executable,
        "-m",
        "megarl",
        "train",
        "experiment=quickstart",
        f"run.name={name}",
        f"trainer.steps={steps}",
        *overrides,
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return run_dir, started, time.time() - started


def report(run_dir: Path, started: float, wall: float) -> list[str]:
    trainer, explorer = phases(run_dir, "trainer_0"), phases(run_dir, "explorer-0")
    count = sum(r["phase"] == "step" for r in trainer)
    waited = next(r for r in trainer if r["phase"] == "wait_for_engine")
    first_step = next(r for r in trainer if r["phase"] == "step")
    # A resumed job connects inside its first step's sync: that wait belongs to the start-up.
    inside = waited["seconds"] if waited["start"] >= first_step["start"] else 0.0
    step = total(trainer, "step") - inside
    start_up = waited["start"] + waited["seconds"] - started - total(trainer, "warm_start")
    lines = [
        f"Start-up (command to first sync, without the warm start): **{start_up:.1f} s**; whole command {wall:.0f} s.",
        "",
    ]
    lines += ["| phase of a step | seconds a step | share |", "|---|---|---|"]
    for name in PHASES:
        seconds = sum(r["seconds"] for r in trainer if r["phase"] == name and "step" in r)
        seconds -= inside if name == "sync" else 0.0
        lines.append(f"| {name} | {seconds / count:.2f} | {seconds / step:.0%} |")
    lines.append(f"| whole step | {step / count:.2f} | 100% |")
    rewards = sum(r["seconds"] for r in explorer if r["phase"] == "reward" and r["rollout"].startswith("train"))
    generating = sum(r["seconds"] for r in explorer if r["phase"] == "generation" and r["rollout"].startswith("train"))
    lines += ["", "| outside the steps | seconds |", "|---|---|"]
    once: dict[str, float] = defaultdict(float)
    for r in trainer:
        if "step" not in r or r["phase"] == "evaluation":
            once[r["phase"]] += r["seconds"]
    lines += [f"| {name} | {seconds:.1f} |" for name, seconds in once.items()]
    waits = {
        "trainer waits for the rollout": total(trainer, "rollout") / step,
        "engine waits for the trainer": 1 - generating / step,
    }
    lines += [
        "",
        f"Rewards were being scored for {rewards / count:.2f} s a step, overlapped with {generating / count:.2f} s of "
        "generation.",
    ]
    lines += [f"{name}: {share:.0%} of the step." for name, share in waits.items()]
    worst = max(waits, key=lambda name: waits[name])
    lines += [
        f"Largest share that is waste: **{worst}** ({waits[worst]:.0%}): the two take turns, because each step is "
        "on-policy."
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    arguments, overrides = parser.parse_known_args()
    overrides = ["trainer.warm_start.steps=20", "trainer.checkpoint_interval=5", *overrides]
    lines: list[str] = []
    shutil.rmtree(ROOT / "runs" / "bench-loop", ignore_errors=True)
    for label, steps in (
        ("First run", arguments.steps),
        ("Second run: the same command again, with more steps", 2 * arguments.steps),
    ):
        shutil.rmtree(ROOT / "runs" / "bench-loop" / "timeline", ignore_errors=True)
        lines += [f"## {label}", "", *report(*run("bench-loop", steps, overrides)), ""]
    text = "\n".join(lines)
    page.write("benchmarks/loop.md", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
