"""Rewards: verifications a second, and what a rollout costs whose verifier is slow. Writes docs/benchmarks/rewards.md.

    python benchmarks/rewards.py [--only throughput|overlap] [--steps 6]

Overlap is measured in whole jobs (two trainer ranks, one vLLM engine): one whose verifier answers at once, then
verifiers that sleep. A rollout is compared with the longer of what generation takes by itself (the first job) and what
scoring takes by itself (answers × sleep / workers), all in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import page

from megarl.config.rewards import RewardConfig
from megarl.core.schema import Task
from megarl.rewards import RewardPool
from megarl.rewards.routes import scorer_for

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "unit" / "cases"
WORKERS = 16
SLEEPY = """
import time
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return float(solution_str.strip() == ground_truth)
"""


def cases(name: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """(response, ground truth, extra_info) of every row of a table of cases; the tables' first lines say how they are
    written."""
    found = []
    for line in (CASES / f"{name}.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kind, _, gold, answer, info = [*line.split("\t"), ""][:5]
        response = answer[2:].replace("⏎", "\n") if answer.startswith("> ") else f"\\boxed{{{answer}}}"
        truth = json.loads(gold[1:]) if name == "k12" and gold.startswith("!") else gold
        extra = json.loads(info) if info else {}
        found.append((response, truth, extra if name == "math" or kind.endswith("?") else extra | {"type": kind}))
    return found


def throughput() -> list[str]:
    lines = [
        "| verifier | rows | one process, every row once | again (its caches warm) | pool of 2 workers |",
        "|---|---|---|---|---|",
    ]
    for name in ("math", "k12"):
        rows = cases(name)
        score = scorer_for(name)
        score("1", "1", None)
        rates = []
        for _ in range(2):
            began = time.perf_counter()
            for row in rows:
                score(*row)
            rates.append(len(rows) / (time.perf_counter() - began))
        lines.append(
            f"| {name} | {len(rows)} | {rates[0]:.0f}/s | {rates[1]:.0f}/s | {asyncio.run(pooled(name, rows)):.0f}/s |"
        )
    return lines


async def pooled(name: str, rows: list[tuple[str, Any, dict[str, Any]]]) -> float:
    prompt = ({"role": "user", "content": "?"},)
    tasks = [
        (Task(f"t/{i}", name, prompt, "", {"ground_truth": truth}, info), answer)
        for i, (answer, truth, info) in enumerate(rows)
    ]
    async with RewardPool(RewardConfig(workers=2)) as pool:
        await asyncio.gather(*(pool.score(tasks[0][0], "1") for _ in range(2)))  # imports
        began = time.perf_counter()
        await asyncio.gather(*(pool.score(task, answer) for task, answer in tasks))
        return len(tasks) / (time.perf_counter() - began)


class Workload(NamedTuple):
    answers: str
    verdicts_s: tuple[float, ...]
    """What a verdict takes in each job; in the first job nothing."""
    settings: tuple[str, ...]


SHORT = Workload("of at most 8 tokens", (0.0, 0.02, 0.06), ("trainer.warm_start.steps=60",))
LONG = Workload(
    "of up to 192 tokens",
    (0.0, 0.1, 0.4),
    ("trainer.warm_start.steps=1", "rollout.max_response_tokens=192", "model.from_scratch.max_position_embeddings=256"),
)


def overlap(steps: int, folder: Path, work: Workload) -> list[str]:
    """A table of medians over the steps after the first two."""
    lines = [
        f"| a verdict takes | generation alone | scoring alone, {WORKERS} workers | rollout | / the longer "
        "| overlapped |",
        "|---|---|---|---|---|---|",
    ]
    alone = 0.0
    for seconds in work.verdicts_s:
        run_dir = folder / f"{work.answers.replace(' ', '_')}_{seconds:g}"
        (folder / "reward.py").write_text(SLEEPY.format(seconds=seconds))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "megarl.cli",
                "train",
                "experiment=quickstart",
                f"run.dir={run_dir}",
                f"reward.path={folder}/reward.py",
                f"reward.workers={WORKERS}",
                f"trainer.steps={steps}",
                "trainer.tasks_per_step=128",
                "rollout.concurrent_groups=128",
                *work.settings,
                "taskset.eval_size=20",
                "trainer.eval_interval=0",
                "taskset.train_size=2000",
                "taskset.warm_start_size=2000",
            ],
            check=True,
        )
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        found = [r for r in records if "timing_s/rollout" in r][2:]
        middle = {
            name: statistics.median(r[name] for r in found)
            for name in found[0]
            if name.startswith(("timing_s/rollout", "rollout/"))
        }
        if seconds == 0:
            alone = middle["rollout/generation_s"]
        scoring = middle["rollout/samples"] * seconds / WORKERS
        wall = middle["timing_s/rollout"]
        lines.append(
            f"| {1000 * seconds:.0f} ms | {alone:.2f} s | {scoring:.2f} s | {wall:.2f} s | "
            f"{wall / max(alone, scoring):.2f} | "
            f"{middle['rollout/overlap_s'] / max(middle['rollout/reward_s'], 1e-9):.0%} of scoring's time |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("throughput", "overlap"))
    parser.add_argument("--answers", choices=("short", "long"), help="one of the two workloads of overlap alone")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="folder for the jobs, to look at their reports")
    arguments = parser.parse_args()
    parts: dict[str, list[str]] = {}
    if arguments.only != "overlap":
        parts["Verifications a second"] = throughput()
    if arguments.only != "throughput":
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            for work in (
                (SHORT, LONG) if arguments.answers is None else (SHORT,) if arguments.answers == "short" else (LONG,)
            ):
                parts[f"A slow verifier beside generation, answers {work.answers}"] = overlap(
                    arguments.steps, folder, work
                )
    text = "".join(f"## {title}\n" + "\n".join(lines) + "\n\n" for title, lines in parts.items())
    print(text)
    if arguments.only is None and arguments.answers is None:
        note = (__doc__ or "").split("\n\n", 2)[2].strip()
        text = f"{note}\n\n{text}"
        page.write("benchmarks/rewards.md", text)


if __name__ == "__main__":
    main()
