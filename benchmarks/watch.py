"""Seconds of the pages of `megarl watch` on a run with a million trajectories.

``python benchmarks/watch.py --model DIR [--trajectories N] [--write]``: makes a store of that size, then times pages.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import page

from megarl.buffer.store import Store
from megarl.buffer.store.codec import trajectory_to_row
from megarl.buffer.store.tables import GROUPS, ROLLOUTS, TRAJECTORIES
from megarl.config import compose, save_resolved
from megarl.core.schema import Reward, Task, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.run.watch import pages
from megarl.run.watch.watched import WatchedRun

SIZE, PER_STEP, TASKS, TOKENS = 16, 64, 4096, 40
METRICS = 200


def fill(folder: Path, trajectories: int, model: str) -> None:
    """A run of quickstart's shape with that many trajectories, ``METRICS`` metrics a step."""
    config = compose(["experiment=quickstart", "run.name=large"])
    url = f"sqlite:///{folder}/store.db"
    config = replace(config, run=replace(config.run, dir=str(folder)), store=replace(config.store, url=url))
    config = replace(config, model=replace(config.model, path=model))
    save_resolved(config, folder / "resolved.json")
    store = Store(url)
    prompt: list[tuple[dict[str, str], ...]] = [({"role": "user", "content": f"What is {i}?"},) for i in range(TASKS)]
    store.tasks.add("train", [Task(f"t{i}", "s", prompt[i], "", {"ground_truth": str(i)}) for i in range(TASKS)])
    version, ids = WeightsVersion(1, 1), np.arange(TOKENS, dtype=np.int32)
    spans = (WeightsSpan(0, TOKENS, version),)
    turns = (Turn("user", ids), Turn("model", ids, 0, np.full(TOKENS, -0.5, np.float32), spans, "stop"))
    first = Trajectory("r", "t", "g", 0, SIZE, turns, Reward(1.0, "ok"))
    row = trajectory_to_row(first)
    metrics = {f"group/metric_{i}": float(i) for i in range(METRICS)} | {"critic/rewards/mean": 0.5}
    for step in range(trajectories // (SIZE * PER_STEP)):
        name = f"train-{step:06d}"
        groups = [f"{name}/{i}" for i in range(PER_STEP)]
        asked = {
            "rollout_id": name, "kind": "train", "step": step, "version": "1.1", "num_groups": PER_STEP,
            "group_size": SIZE, "sampling": "{}", "requested_at": float(step),
        }  # fmt: skip
        of_groups = [
            {
                "group_id": group, "rollout_id": name, "position": i, "task_id": f"t{(step * PER_STEP + i) % TASKS}",
                "state": "consumed", "attempt": 1, "used_by": step + 1,
            }
            for i, group in enumerate(groups)
        ]  # fmt: skip
        members = [
            row
            | {"group_id": group, "rollout_id": name, "task_id": each["task_id"], "index": i, "score": float(i == 0)}
            for group, each in zip(groups, of_groups, strict=True)
            for i in range(SIZE)
        ]

        def work(connection, again, asked=asked, of_groups=of_groups, members=members) -> None:  # type: ignore[no-untyped-def]
            connection.execute(ROLLOUTS.insert(), asked)
            connection.execute(GROUPS.insert(), of_groups)
            connection.execute(TRAJECTORIES.insert(), members)

        store.database.write(work)
        store.journal.record_step(step + 1, metrics)
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer of at least 40 tokens")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks/watch.md")
    arguments = parser.parse_args()
    lines = ["| page | first, s | again, s |", "|---|--:|--:|"]
    with tempfile.TemporaryDirectory(prefix="megarl-watch-") as path:
        folder = Path(path)
        fill(folder, arguments.trajectories, str(Path(arguments.model).resolve()))
        run = WatchedRun(folder)

        def overview() -> object:
            return pages.overview(WatchedRun(folder).now())

        def groups(filters: str = "", words: str = "", skipped: int = 0) -> Callable[[], object]:
            return lambda: pages.groups(folder, filters, words, skipped, str)

        cases = {
            "overview": overview,
            "overview, not changed": lambda: run.now(),
            "groups": groups(),
            "groups, page 1,000": groups(skipped=6_000),
            "groups with reward=1": groups("reward=1.."),
            "groups with a reward that none has": groups("reward=7.."),
            "groups of step 3": groups("steps=3"),
            "groups with a text": groups(words="What is 17?"),
            "groups with a text that none has": groups(words="nothing has this"),
        }
        for name, work in cases.items():
            seconds = []
            for _ in range(3):
                begun = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - begun)
            lines.append(f"| {name} | {seconds[0]:.3f} | {min(seconds[1:]):.3f} |")
            print(lines[-1], flush=True)
    if arguments.write:
        page.write("benchmarks/watch.md", "\n".join(lines))


if __name__ == "__main__":
    main()
