"""Do jobs of several turns learn? An environment, an agent written against the openai package, and tools.

``environment`` is ``experiment=guess`` with fewer steps; ``agent`` plays the same game, from the same warm-started
model, by ``configs/agents/guess.py``. ``tools`` asks for the number in a drawer of a room, which only the function of
``benchmarks/look/tool.py`` knows. Its warm start teaches the form of a call, by a teacher who is mostly wrong: a guess
without a call, the next drawer, the next number.

Repeat the command to resume: finished runs are kept in ``runs/workflows/``. Prints a Markdown table and writes it, with
curves, to ``docs/benchmarks/workflows.md``.

    python benchmarks/workflows.py [--arms environment agent tools] [--seeds 1 2 3] [--runs DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import page

from megarl.buffer.store import Selection
from megarl.core.schema import Task
from megarl.run.data.open_run import stored_run
from megarl.run.data.trained_tokens import count_trained
from megarl.run.report.svg import Markers, line_chart
from megarl.tasks.rows import write_rows

LOOK = jobs.ROOT / "benchmarks" / "look"
GUESSED, NEXT_DRAWER, NEXT_NUMBER = 0.5, 0.6, 0.6
"""Shares of the careless teacher: answers without a call, calls of the next drawer, answers that are one too high."""
END = 5
"""Steps whose mean reward is shown, at either end of a run."""
EVERY = 20
"""Steps between two evaluations."""
COMMON = ["experiment=guess", "parallel=tp1", "trainer.tasks_per_step=32"]


@dataclass(frozen=True)
class Start:
    """A warm-started model and its files."""

    settings: Sequence[str] = ()
    write: Callable[[Path], None] | None = None
    """Function that writes the files of rows into a folder; None where the job makes them."""


@dataclass(frozen=True)
class Arm:
    """Runs that begin with one start."""

    start: str
    settings: Sequence[str] = ()
    steps: int = 2 * EVERY


def call_of(drawer: int) -> str:
    """A call in the form of ``rollout.tool_format=hermes``."""
    return f'<tool_call>{{"name": "look", "arguments": {{"drawer": {drawer}}}}}</tool_call>'


def rooms(seed: int, split: str) -> Iterator[tuple[int, Task]]:
    """Drawers that are asked for, with their tasks; endless. A room's number decides on its split."""
    dice = random.Random(seed)
    for index in itertools.count():
        room, drawer = dice.randrange(1000, 10_000), dice.randrange(10)
        if (room % 10 == 0) != (split == "eval"):
            continue
        drawers = random.Random(room).sample(range(10), 10)
        yield (
            drawer,
            Task(
                f"{split}/{index}",
                "look",
                ({"role": "user", "content": f"Room {room}. What is in drawer {drawer}?"},),
                "tools",
                reward_model={"style": "rule", "ground_truth": str(drawers[drawer])},
                extra_info={"drawers": drawers},
            ),
        )


def write_rooms(folder: Path) -> None:
    """Write tasks, held-out tasks, and demonstrations of first and of last responses."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, size) in enumerate((("train", 4000), ("eval", 200))):
        drawn = {str(task.prompt): task for _, task in itertools.islice(rooms(seed, split), size)}
        write_rows(folder / f"{split}.parquet", list(drawn.values()))
    dice = random.Random(3)
    lines = []
    for drawer, task in itertools.islice(rooms(2, "warm_start"), 6000):
        asked = (drawer + (dice.random() < NEXT_DRAWER)) % 10
        found = dice.randrange(10)
        prompt: list[Any] = list(task.prompt)
        if dice.random() < 0.5:
            response = str(found) if dice.random() < GUESSED else call_of(asked)
        else:
            prompt += [{"role": "assistant", "content": call_of(asked)}, {"role": "user", "content": str(found)}]
            response = str((found + (dice.random() < NEXT_NUMBER)) % 10)
        lines.append(json.dumps({"prompt": prompt, "response": response}))
    (folder / "warm_start.jsonl").write_text("\n".join(lines) + "\n")


STARTS = {
    "game": Start(),
    "rooms": Start(
        [
            "taskset.generate=null", "taskset.options={}", "model.from_scratch.max_position_embeddings=128",
            "rollout.workflow=tools", f"rollout.tools=[{LOOK}/tool.py]", "rollout.tool_format=hermes",
            "rollout.max_tool_calls=2", f"reward.path={LOOK}/score.py", "rollout.max_prompt_tokens=32",
            "rollout.max_response_tokens=32", "rollout.max_trajectory_tokens=112",
        ],
        write_rooms,
    ),
}  # fmt: skip
ARMS = {
    "environment": Arm("game"),
    "agent": Arm(
        "game",
        ["rollout.workflow=agent", f"rollout.agent={jobs.ROOT}/configs/agents/guess.py", "rollout.agent_rewards=true"],
    ),
    "tools": Arm("rooms", ["trainer.updates_per_step=2", "trainer.optimizer.lr=3e-4"], EVERY),
}


def make_start(runs: Path, name: str) -> None:
    """Train the warm start of a model where it is not there."""
    folder, start = runs / name, STARTS[name]
    if (folder / "hf" / "config.json").is_file():
        return
    files = []
    if start.write is not None:
        start.write(folder / "data")
        files = [f"taskset.{split}={folder}/data/{split}.parquet" for split in ("train", "eval")]
        files += [f"taskset.warm_start={folder}/data/warm_start.jsonl"]
    last = ["trainer.steps=1", "trainer.optimizer.lr=0.0", "trainer.eval_interval=0"]
    jobs.train(folder, [*COMMON, *start.settings, *files, *last])


def measured(run_dir: Path) -> dict[str, Any]:
    """Mean reward of each step, and held-out accuracy by the steps before it."""
    rewards: dict[int, float] = {}
    accuracies: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "critic/score/mean" in record:
            rewards[record["step"]] = record["critic/score/mean"]
        if "val/accuracy" in record:
            accuracies[record["step"]] = record["val/accuracy"]
    return {"rewards": sorted(rewards.items()), "accuracies": sorted(accuracies.items())}


def trained_tokens(run_dir: Path) -> int:
    """Tokens that the run's steps have trained on. Raises AssertionError where one was not sampled by its model."""
    with stored_run(run_dir, Selection()) as opened:
        found = count_trained(opened)
    assert not found.wrong, found.text()
    return found.trained


def settings_of(runs: Path, name: str, seed: int) -> list[str]:
    """Overrides of one run, beside COMMON and its folder."""
    arm = ARMS[name]
    start = runs / arm.start
    own = [
        f"taskset.train={start}/data/train.parquet", f"taskset.eval={start}/data/eval.parquet",
        "taskset.generate=null", "taskset.options={}", "taskset.warm_start=null", f"model.path={start}/hf",
        "model.from_scratch=null", "trainer.warm_start.steps=0", f"trainer.steps={arm.steps}",
        f"trainer.eval_interval={EVERY}", f"trainer.checkpoint_interval={EVERY}", f"trainer.seed={seed}",
        "trainer.keep_batches=true",
    ]  # fmt: skip
    return [*STARTS[arm.start].settings, *own, *arm.settings]


def one(runs: Path, name: str, seed: int) -> dict[str, Any]:
    """Result of one run; of an earlier start where it is there."""
    run_dir = runs / f"{name}-{seed}"

    def make() -> dict[str, Any]:
        make_start(runs, ARMS[name].start)
        seconds = jobs.train(run_dir, [*COMMON, *settings_of(runs, name, seed)])
        return {**measured(run_dir), "tokens": trained_tokens(run_dir), "seconds": seconds}

    return jobs.kept(run_dir / "result.json", make)


def means(series: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """(step, mean over the runs) of their (step, value)."""
    return [(int(points[0][0]), statistics.mean(value for _, value in points)) for points in zip(*series, strict=True)]


def say(text: page.Text, name: str, found: Sequence[dict[str, Any]]) -> None:
    """Write the row of an arm, and draw its curve."""
    shown = "; ".join(" → ".join(f"{100 * value:.1f}%" for _, value in run["accuracies"]) for run in found)
    rewards = means([run["rewards"] for run in found])
    first, last = (statistics.mean(value for _, value in part) for part in (rewards[:END], rewards[-END:]))
    text.say(f"| `{name}` | {shown} | {first:.2f} → {last:.2f} |")
    marks = Markers("held-out accuracy", means([run["accuracies"] for run in found]))
    page.picture(f"workflows_{name}.svg", line_chart("mean reward", rewards, markers=marks, width=680, zero=True))
    print(f"{name}: {statistics.mean(run['seconds'] for run in found):.0f} s a run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=jobs.ROOT / "runs" / "workflows")
    arguments = parser.parse_args()
    runs = arguments.runs.absolute()
    runs.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.arms}
    for seed, name in itertools.product(arguments.seeds, arguments.arms):  # what is cut short has runs of every arm
        results[name].append(one(runs, name, seed))
    text = page.Text()
    text.say(
        f"| workflow | held-out accuracy by seed: before, and after every {EVERY} steps | "
        f"mean reward of the first → last {END} steps |"
    )
    text.say("|---|---|---|")
    for name, found in results.items():
        say(text, name, found)
    text.say("")
    tokens = sum(run["tokens"] for found in results.values() for run in found)
    text.say(
        f"{tokens:,} tokens were trained in these runs. By `megarl data tokens RUN` none of them differs from the one "
        "that was sampled, and none is of an environment or a tool."
    )
    for name in results:
        text.say("")
        text.say(f"`{name}`: mean reward of each step over the seeds, and held-out accuracy (diamonds)")
        text.say("")
        text.say(f"![{name}](../images/workflows_{name}.svg)")
    page.write("benchmarks/workflows.md", str(text))


if __name__ == "__main__":
    main()
