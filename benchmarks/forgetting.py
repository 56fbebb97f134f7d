"""Does replay keep what a plain run forgets? Two families of tasks one after the other: sums, then differences alone,
whose right answer is said to be one more than it is.

Two seeds of each arm, from one warm-started model; the held-out sums are answered at the end of either half. Repeat
the command to resume: finished runs are kept in ``runs/forgetting/``. Prints a Markdown table and writes it to
``docs/benchmarks/forgetting.md``.

    python benchmarks/forgetting.py [--seeds 1 2] [--steps N] [--runs DIR] [hydra overrides]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import page

TASKS, REPLAYED = 32, 16
ARMS: dict[str, list[str]] = {
    "plain": [],
    "replay": [
        f"buffer.replay.share={REPLAYED / TASKS}",
        "buffer.replay.uses=8",
        "buffer.replay.max_age=100",
        "buffer.replay.decay=1.0",
        "algorithm.correction=truncate",
    ],
}
"""Settings of each arm: replay draws evenly from all earlier steps."""
COMMON = [
    "experiment=quickstart", f"trainer.tasks_per_step={TASKS}", "trainer.updates_per_step=2", "parallel=tp1",
    "algorithm.kl.coef=0.0", "trainer.optimizer.lr=2.0e-4",
]  # fmt: skip


def is_sum(task: Any) -> bool:
    """Return True for a sum, False for a difference."""
    return "-" not in str(task.prompt[-1]["content"])


def write_halves(data: Path, folder: Path, steps: int, sampled: int) -> None:
    """Write sums for the first half of the steps and differences for the second, and held-out sums."""
    from megarl.tasks.rows import read_rows, write_rows

    rows, half = read_rows(data / "train.parquet"), steps // 2 * sampled
    halves = [[row for row in rows if is_sum(row) is wanted][:half] for wanted in (True, False)]
    halves[1] = [
        replace(row, reward_model={**row.reward_model, "ground_truth": str(int(row.ground_truth) + 1)})
        for row in halves[1]
    ]
    assert [len(rows) for rows in halves] == [half, half], "too few rows: raise taskset.train_size"
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.parquet", [*halves[0], *halves[1]])
    write_rows(folder / "eval.parquet", [row for row in read_rows(data / "eval.parquet") if is_sum(row)])


def measured(run_dir: Path, steps: int) -> dict[str, Any]:
    """Accuracy on held-out sums before, between and after the halves, and families that steps replayed."""
    from megarl.buffer.store import Store
    from megarl.config import load_resolved

    store = Store(load_resolved(run_dir / "resolved.json").store.url, read_only=True)
    accuracies = [event["data"]["accuracy"] for event in store.journal.events("evaluation")]
    tasks = {task.task_id: task for task in store.tasks.read("train")}
    shares: dict[str, list[float]] = {"sampled": [], "replayed": []}
    for step in range(steps):
        groups = {
            "sampled": [group.group_id for group in store.replays.consumed(step, step + 1)],
            "replayed": list(store.replays.counts(step, step + 1)),
        }
        for kind, ids in groups.items():
            found = [is_sum(tasks[store.groups.read([i])[0].task_id]) for i in ids]
            shares[kind].append(sum(found) / len(found) if found else 0.0)
    store.close()
    assert shares["sampled"] == [1.0] * (steps // 2) + [0.0] * (steps // 2), "the families did not follow each other"
    replayed = statistics.mean(shares["replayed"][steps // 2 :])
    return {"accuracies": accuracies, "sums replayed after the change": replayed}


def one(runs: Path, arm: str, seed: int, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Result of one run; of an earlier start where it is there."""
    run_dir, start = runs / f"{arm}-{seed}", runs / "start"

    def make() -> dict[str, Any]:
        sampled = TASKS - (REPLAYED if arm == "replay" else 0)
        write_halves(start / "data", runs / f"data-{arm}", steps, sampled)
        own = [
            f"taskset.train={runs}/data-{arm}/train.parquet", f"taskset.eval={runs}/data-{arm}/eval.parquet",
            "taskset.generate=null", "taskset.warm_start=null", "taskset.expert=null", "taskset.order=file",
            f"model.path={start}/hf", "model.from_scratch=null", "trainer.warm_start.steps=0",
            f"trainer.steps={steps}", f"trainer.eval_interval={steps // 2}", f"trainer.checkpoint_interval={steps}",
            f"trainer.seed={seed}",
        ]  # fmt: skip
        seconds = jobs.train(run_dir, [*COMMON, *own, *ARMS[arm], *overrides])
        return {**measured(run_dir, steps), "seconds": seconds}

    return jobs.kept(run_dir / "result.json", make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of both halves together")
    parser.add_argument("--runs", type=Path, default=jobs.ROOT / "runs" / "forgetting")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    runs, steps = arguments.runs.absolute(), arguments.steps
    if not (runs / "start" / "hf" / "config.json").is_file():
        jobs.train(runs / "start", [*COMMON, "trainer.steps=1", "trainer.optimizer.lr=0.0", "trainer.eval_interval=0"])
    text = page.Text()
    text.say("| arm | held-out sums: before → after sums → after differences | mean change in the second half |")
    text.say("|---|---|---|")
    for arm in ARMS:
        found = [one(runs, arm, seed, steps, arguments.overrides) for seed in arguments.seeds]
        series = [[100 * accuracy for accuracy in result["accuracies"]] for result in found]
        shown = "; ".join(" → ".join(f"{accuracy:.1f}%" for accuracy in accuracies) for accuracies in series)
        change = statistics.mean(accuracies[-1] - accuracies[-2] for accuracies in series)
        text.say(f"| {arm} | {shown} | {change:+.1f} points |")
        seconds = statistics.mean(result["seconds"] for result in found)
        replayed = statistics.mean(result["sums replayed after the change"] for result in found)
        print(f"{arm}: {seconds:.0f} s a run; share of sums among replayed groups of the second half {replayed:.2f}")
    page.write("benchmarks/forgetting.md", str(text))


if __name__ == "__main__":
    main()
