"""Do megarl's own verifiers teach? The quickstart with math, K-12 and code tasks, beside learning rate 0 from the same
warm start.

Repeat the command to resume: finished runs are kept in ``--runs``. Prints a Markdown table and writes it to
``docs/benchmarks/rewards_quickstart.md`` with the commit, the durations and what the verifiers took.

    python benchmarks/rewards_quickstart.py [--tasksets math k12 code] [--controls math] [--seeds 1 2 3] [--runs DIR]
    [hydra overrides]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import page

ROOT = Path(__file__).resolve().parent.parent
HEAD = "| tasks | seed | GRPO | learning rate 0 | minutes | answers | s in the verifier, mean | max | error | timeout |"


def run(run_dir: Path, overrides: Sequence[str]) -> float:
    """Seconds of a finished job; runs it unless it is there."""
    result = run_dir.with_suffix(".seconds.json")
    if not result.is_file():
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "megarl", "train", "experiment=quickstart", f"run.dir={run_dir}", *overrides],
            cwd=ROOT,
            check=True,
        )
        result.write_text(json.dumps(time.monotonic() - started))
    return float(json.loads(result.read_text()))


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def accuracy(records: Sequence[dict[str, float]]) -> str:
    """Before and after, on held-out tasks, greedy."""
    found = [record["val/accuracy"] for record in records if "val/accuracy" in record]
    return f"{found[0]:.1%} → {found[-1]:.1%}"


def row(runs: Path, name: str, seed: int, overrides: Sequence[str], with_control: bool) -> str:
    chosen = [f"taskset={name}", f"trainer.seed={seed}", *overrides]
    grpo = runs / f"{name}-{seed}"
    seconds = run(grpo, chosen)
    control = runs / f"{name}-{seed}-lr0"
    if with_control:
        run(
            control,
            [*chosen, "trainer.optimizer.lr=0.0", f"model.path={grpo / 'reference'}", "trainer.warm_start.steps=0"],
        )
    records = metrics(grpo)
    verified = [record for record in records if f"reward/{name}/answers" in record]
    answers = sum(record[f"reward/{name}/answers"] for record in verified)
    mean = (
        sum(record[f"reward/{name}/seconds/mean"] * record[f"reward/{name}/answers"] for record in verified) / answers
    )
    longest = max(record[f"reward/{name}/seconds/max"] for record in verified)
    faults = [sum(record[f"reward/{name}/{status}"] for record in verified) for status in ("error", "timeout")]
    cells = [
        name,
        seed,
        accuracy(records),
        accuracy(metrics(control)) if with_control else "",
        f"{seconds / 60:.1f}",
        f"{answers:,.0f}",
    ]
    cells += [f"{mean:.4f}", f"{longest:.2f}", *(f"{number:.0f}" for number in faults)]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasksets", nargs="+", default=["math", "k12", "code"])
    parser.add_argument(
        "--controls", nargs="*", default=["math", "k12", "code"], help="tasks that have the control (default: all)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "rewards_quickstart")
    arguments, overrides = parser.parse_known_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    runs = arguments.runs.resolve()
    rows = [
        row(runs, name, seed, overrides, name in arguments.controls)
        for name in arguments.tasksets
        for seed in arguments.seeds
    ]
    lines = [
        "`taskset=math`, `k12` and `code` as they are shipped: held-out accuracy (greedy) before → after GRPO; the "
        "control is the same job from the same warm start with learning rate 0.",
        "Answers, seconds, errors and timeouts are those of the training steps; minutes those of the whole job with "
        "its warm start.",
        "",
        HEAD,
        "|---" * (HEAD.count("|") - 1) + "|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    page.write("benchmarks/rewards_quickstart.md", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
