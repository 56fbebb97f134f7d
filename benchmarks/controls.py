"""Does the reward do it? The quickstart beside two controls: learning rate 0, and rewards shuffled within each rollout.

Three seeds of each. Repeat the command to resume: finished runs are kept in ``runs/controls/``. Prints a Markdown table
and writes it to ``docs/benchmarks/controls.md`` with the commit and the durations.

    python benchmarks/controls.py [--seeds 1 2 3] [--arms GRPO] [--steps N] [hydra overrides]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import jobs
import page

ARMS = {"GRPO": [], "learning rate 0": ["trainer.optimizer.lr=0.0"], "shuffled rewards": ["reward.shuffle=true"]}


def accuracies(run_dir: Path) -> dict[str, float]:
    """Held-out accuracy by rollout id (eval-before, eval-after), from the run's store."""
    from megarl.buffer.store import Store
    from megarl.config import load_resolved

    store = Store(load_resolved(run_dir / "resolved.json").store.url)
    found = {e["data"]["rollout_id"]: e["data"]["accuracy"] for e in store.journal.events("evaluation")}
    store.close()
    return found


def run(name: str, overrides: list[str]) -> dict[str, Any]:
    """Result of one run; of an earlier start where it is there."""
    run_dir = jobs.ROOT / "runs" / "controls" / name

    def make() -> dict[str, Any]:
        seconds = jobs.train(run_dir, ["experiment=quickstart", *overrides])
        found = accuracies(run_dir)
        return {"before": found["eval-before"], "after": found["eval-after"], "seconds": seconds}

    return jobs.kept(run_dir / "result.json", make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument(
        "--steps", type=int, default=None, help="reinforcement-learning steps (default: the experiment's)"
    )
    arguments, overrides = parser.parse_known_args()
    if arguments.steps is not None:
        overrides.append(f"trainer.steps={arguments.steps}")
    lines = [
        "Held-out accuracy on 500 tasks, greedy, before → after the reinforcement-learning steps; the three arms of a "
        "seed share its warm-started weights.",
        "",
        "| arm | " + " | ".join(f"seed {s}" for s in arguments.seeds) + " | mean change | minutes a run |",
        "|---|" + "---|" * (len(arguments.seeds) + 2),
    ]
    for arm in arguments.arms:
        results, settings = [], ARMS[arm]
        for seed in arguments.seeds:
            first = jobs.ROOT / "runs" / "controls" / f"grpo-{seed}"
            shared = [] if arm == "GRPO" else [f"model.path={first / 'reference'}", "trainer.warm_start.steps=0"]
            slug = arm.lower().replace(" ", "-")
            results.append(run(f"{slug}-{seed}", [f"trainer.seed={seed}", *settings, *shared, *overrides]))
        changes = [r["after"] - r["before"] for r in results]
        cells = [f"{r['before']:.1%} → {r['after']:.1%}" for r in results]
        minutes = statistics.mean(r["seconds"] for r in results) / 60
        lines.append(
            f"| {arm} | " + " | ".join(cells) + f" | {statistics.mean(changes) * 100:+.1f} points | {minutes:.1f} |"
        )
    text = "\n".join(lines) + "\n"
    page.write("benchmarks/controls.md", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
