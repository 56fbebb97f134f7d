"""Jobs killed with SIGKILL at random moments, each compared to the bit with one that was left alone.

    python -m tests.system.soak [--moments 30] [--seed 1] [--dir runs/soak] [hydra overrides]

Every run is killed ``KILLS`` times, each time with all that belongs to it, and started again; at its end its
checkpoints (parameters, moments, random states), its steps' metrics, its tasks, answers, log-probs and rewards must be
those of the reference run. Moments are drawn from the seed, a step and a fraction of its length; what the job was doing
is printed with them. Finished runs are kept in
``--dir``: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megarl.buffer.store import Store
from megarl.buffer.store.tables import WHOLE
from megarl.weights.checkpoint.training.manifest import read_manifest
from tests.system.jobs import TINY, Job

KILLS, STEPS, EVERY = 3, 10, 2
SETTINGS = (*TINY, f"trainer.steps={STEPS}", f"trainer.checkpoint_interval={EVERY}", "trainer.keep_checkpoints=100")
END_S = 3600.0
NOT_COMPARED = re.compile(r"(timing_s|idle|perf|rollout|sync|training/attempt)|reward/\w+/(seconds|waited_s)/")
"""What depends on the machine or counts attempts."""


def run_to_its_end(run_dir: Path, settings: list[str]) -> None:
    job = Job(run_dir, settings).start()
    try:
        if job.wait(END_S) != 0:
            raise SystemExit(f"{run_dir}: the job ended with {job.poll()}; see {job.output}")
    finally:
        job.clean_up()


def kill(job: Job) -> None:
    for pid in [job.pid, *job.processes()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait(60)
    job.until_gone(120)


def doing(job: Job, step: int) -> str:
    """What a killed job was at, as far as its files tell."""
    writing = [path.name for path in (job.run_dir / "checkpoints").glob("global_step_*.attempt_*")]
    groups = [str(state) for (state,) in job.query(f"select state from groups where rollout_id = 'train-{step:06d}'")]
    if not groups:
        what = "between two steps, or in a sync"
    elif (whole := sum(state in WHOLE for state in groups)) < len(groups):
        what = f"in a rollout, {whole} of {len(groups)} groups ready"
    else:
        what = "behind a rollout"
    return what + (f", writing {writing[0]}" if writing else "")


def kill_at_random(run_dir: Path, overrides: list[str], dice: random.Random, step_s: float, done: int) -> int:
    """Start the job and kill it after ``done`` more steps and a fraction of one; the steps that it had recorded."""
    job = Job(run_dir, [*SETTINGS, *overrides]).start()
    try:
        before = max(job.steps(), default=0)
        goal, fraction = min(before + dice.randint(0, done), STEPS - 1), dice.random()
        if goal > before:
            job.until(lambda: goal in job.steps(), f"step {goal}", timeout_s=END_S)
        else:  # in its first step: from the moment at which it asks for a rollout
            newest = "select max(requested_at) from rollouts where kind = 'train'"
            known = ([], [(None,)], job.query(newest))
            job.until(lambda: job.query(newest) not in known, "a rollout", timeout_s=END_S)
        time.sleep(fraction * step_s)
        kill(job)
        reached = max(job.steps(), default=0)
        print(
            f"  killed with {reached} steps recorded, {fraction * step_s:.1f} s later: {doing(job, reached)}",
            flush=True,
        )
        return reached
    finally:
        job.clean_up()


def checkpoints_and_metrics(run_dir: Path) -> dict[str, Any]:
    """Parameters, moments, random states; what was written of each step: name -> value."""
    found: dict[str, Any] = {}
    for path in (run_dir / "checkpoints").glob("global_step_*"):
        for file, digest in read_manifest(path)["files"].items():
            if file.endswith((".distcp", "common.pt", ".json")):
                found[f"{path.name}/{file}"] = digest
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kind = "sft" if "sft/loss" in record else "val" if "val/accuracy" in record else "step"
        key = f"metrics of {kind} {record['step']}"
        kept = {name: value for name, value in record.items() if not NOT_COMPARED.match(name)}
        if found.setdefault(key, kept) != kept:  # an evaluation is done again where a job resumes that was at it
            found[f"{key}, again"] = kept
    return found


def found_in(run_dir: Path, steps: int = STEPS) -> dict[str, Any]:
    """What two runs of so many steps must have alike: name -> value."""
    store = Store(f"sqlite:///{run_dir}/store.db")
    found = checkpoints_and_metrics(run_dir) | answers(store, steps)
    store.close()
    return found


def answers(store: Store, steps: int) -> dict[str, Any]:
    """Return name -> task, tokens, log-probs and reward of each answer of so many steps and both
    evaluations."""
    found: dict[str, Any] = {}
    for rollout in ["eval-before", *(f"train-{step:06d}" for step in range(steps)), "eval-after"]:
        for e in store.groups.trajectories(rollout):
            said = [
                e.task_id,
                e.response.token_ids.tolist(),
                np.asarray(e.response.logp).tobytes().hex(),
                e.reward.score,
                e.finish_reason,
            ]
            found[f"{rollout}, answer {e.group_id}/{e.index}"] = said
    return found


def differences(run_dir: Path, reference: dict[str, Any], steps: int = STEPS) -> list[str]:
    found = found_in(run_dir, steps)
    return sorted(name for name in reference.keys() | found.keys() if reference.get(name) != found.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("runs/soak"))
    arguments, overrides = parser.parse_known_args()
    root = arguments.dir.resolve()
    whole = root / "whole"
    if not (whole / "hf" / "config.json").is_file():
        run_to_its_end(whole, [*SETTINGS, *overrides])
    reference = found_in(whole)
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    step_s = statistics.median(record["timing_s/step"] for record in steps if "timing_s/step" in record)
    print(f"the reference: {len(reference)} things to compare, a step takes {step_s:.1f} s", flush=True)
    failed, moments = 0, 0
    for number in range(-(-arguments.moments // KILLS)):
        seed = arguments.seed * 1000 + number
        run_dir, verdict = root / f"killed_{seed}", root / f"killed_{seed}.json"
        if not verdict.is_file():
            print(f"seed {seed}", flush=True)
            shutil.rmtree(run_dir, ignore_errors=True)  # of a soak that was stopped: its moments are drawn again
            dice, reached = random.Random(seed), []
            for _ in range(KILLS):
                reached.append(kill_at_random(run_dir, overrides, dice, step_s, STEPS // KILLS))
            run_to_its_end(run_dir, [*SETTINGS, *overrides])
            verdict.write_text(
                json.dumps({"seed": seed, "killed_behind": reached, "differences": differences(run_dir, reference)})
            )
        result = json.loads(verdict.read_text())
        moments += len(result["killed_behind"])
        failed += bool(result["differences"])
        text = (
            f"{len(result['differences'])} differ: {result['differences'][:5]}"
            if result["differences"]
            else f"all {len(reference)} alike"
        )
        print(f"seed {seed}, killed behind steps {result['killed_behind']}: {text}", flush=True)
    print(f"{moments} moments, {failed} runs differ")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
