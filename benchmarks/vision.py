"""Does a job on images learn from them? ``experiment=vision`` over seeds, and two runs that must not learn.

All runs begin with one warm-started model, whose teacher counts one too many in most pictures. ``vision`` is the
experiment. In ``still`` the learning rate is 0. In ``shuffled`` each training question has the picture of another, so
its answer cannot be seen; what is held out stays as it is.

Repeat the command to resume: finished runs are kept in ``runs/vision/``. Prints a Markdown table and writes it, with a
curve, to ``docs/benchmarks/vision.md``.

    python benchmarks/vision.py [--seeds 1 2 3] [--runs DIR]
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import page
from workflows import means, measured

from megarl.run.report.svg import Markers, line_chart
from megarl.tasks.rows import read_rows, write_rows

EXPERIMENT = "experiment=vision"
START = "start"
END = 5
"""Steps whose mean reward is shown, at either end of a run."""
ARMS: dict[str, Sequence[str]] = {"vision": (), "still": ("trainer.optimizer.lr=0.0",), "shuffled": ()}


def make_start(runs: Path) -> None:
    """Train the warm start of the model where it is not there, and write training rows with shuffled pictures."""
    folder = runs / START
    if not (folder / "hf" / "config.json").is_file():
        last = ["trainer.steps=1", "trainer.optimizer.lr=0.0", "trainer.eval_interval=0"]
        jobs.train(folder, [EXPERIMENT, *last])
    rows = read_rows(folder / "data" / "train.parquet")
    dealt = list(range(len(rows)))
    random.Random(1).shuffle(dealt)
    shuffled = [replace(row, images=rows[other].images) for row, other in zip(rows, dealt, strict=True)]
    held_out = {(str(row.prompt), row.images) for row in read_rows(folder / "data" / "eval.parquet")}
    kept = [row for row in shuffled if (str(row.prompt), row.images) not in held_out]
    write_rows(folder / "data" / "shuffled.parquet", kept)


def one(runs: Path, name: str, seed: int) -> dict[str, Any]:
    """Result of one run; of an earlier start where it is there."""
    run_dir, start = runs / f"{name}-{seed}", runs / START
    train = start / "data" / ("shuffled.parquet" if name == "shuffled" else "train.parquet")
    own = [
        f"taskset.train={train}", f"taskset.eval={start}/data/eval.parquet", "taskset.generate=null",
        "taskset.options={}", "taskset.warm_start=null", f"model.path={start}/hf", "model.from_scratch=null",
        "trainer.warm_start.steps=0", f"trainer.seed={seed}",
    ]  # fmt: skip

    def make() -> dict[str, Any]:
        seconds = jobs.train(run_dir, [EXPERIMENT, *own, *ARMS[name]])
        return {**measured(run_dir), "seconds": seconds}

    return jobs.kept(run_dir / "result.json", make)


def row_of(name: str, found: Sequence[dict[str, Any]]) -> str:
    """Line of the table."""
    shown = "; ".join(" → ".join(f"{100 * value:.1f}%" for _, value in run["accuracies"]) for run in found)
    rewards = means([run["rewards"] for run in found])
    first, last = (statistics.mean(value for _, value in part) for part in (rewards[:END], rewards[-END:]))
    return f"| `{name}` | {shown} | {first:.2f} → {last:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=jobs.ROOT / "runs" / "vision")
    arguments = parser.parse_args()
    runs, seeds = arguments.runs.absolute(), arguments.seeds
    runs.mkdir(parents=True, exist_ok=True)
    make_start(runs)
    results = {name: [one(runs, name, seed) for seed in (seeds if name == "vision" else seeds[:1])] for name in ARMS}
    text = page.Text()
    text.say(f"| run | held-out accuracy by seed: before, and at evaluations | mean reward of the first → last {END} |")
    text.say("|---|---|---|")
    for name, found in results.items():
        text.say(row_of(name, found))
    seconds = statistics.mean(run["seconds"] for run in results["vision"])
    text.say("")
    text.say(f"{seconds:.0f} s a run of `vision`, after the warm start. Mean reward of each step over its seeds, and")
    text.say("held-out accuracy (diamonds):")
    marks = Markers("held-out accuracy", means([run["accuracies"] for run in results["vision"]]))
    rewards = means([run["rewards"] for run in results["vision"]])
    page.picture("vision.svg", line_chart("mean reward", rewards, markers=marks, width=680, zero=True))
    text.say("")
    text.say("![vision](../images/vision.svg)")
    page.write("benchmarks/vision.md", str(text))


if __name__ == "__main__":
    main()
