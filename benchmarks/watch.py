"""Costs of `megarl watch`: seconds of its pages on a run with a million trajectories, CPU-seconds of a watched job.

``python benchmarks/watch.py --model DIR [--trajectories N] [--write]``: makes a store of that size, then times pages.
``python benchmarks/watch.py --steps 200 [--write]``: trains quickstart's job. A client follows its overview as the
page does, during every other block of steps; the job's CPU-seconds a step are counted with it and without.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import page
import psutil

from megarl.buffer.store import GroupPlace, Store
from megarl.buffer.store.codec import trajectory_to_row
from megarl.buffer.store.tables import GROUPS, ROLLOUTS, TRAJECTORIES
from megarl.config import compose, save_resolved
from megarl.core.schema import Reward, Task, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.run.watch import pages
from megarl.run.watch.watched import WatchedRun

SIZE, PER_STEP, TASKS, TOKENS = 16, 64, 4096, 40
METRICS = 200
BLOCK, POLL_S = 6, 2.0
"""Steps of a block with or without a client; seconds between questions of the page's script."""


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


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU-seconds of processes and of their children that have ended."""
    found = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += sum(process.cpu_times()[:4])
    return found


@contextmanager
def watcher(run_dir: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run `megarl watch`; yield its process and address."""
    command = [sys.executable, "-m", "megarl", "watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield psutil.Process(process.pid), process.stdout.readline().strip()  # type: ignore[union-attr]
        finally:
            process.terminate()


class Follower:
    """Asks for the overview as an open page does: again when its stamp has changed."""

    def __init__(self, address: str) -> None:
        self._address, self._stamp, self._next = f"{address}run/", "", 0.0

    def look(self) -> None:
        """Ask, if the last question is old enough."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + POLL_S
        if self._get("stamp") != self._stamp:
            self._stamp = re.findall(r'data-stamp="([^"]*)"', self._get(""))[0]

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._address + path, timeout=60) as response:
            return response.read().decode()


def job(steps: int) -> list[str]:
    """Table of the job's CPU-seconds a step, in blocks with a client and without."""
    blocks: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="megarl-watch-") as path, ExitStack() as stack:
        run_dir = Path(path) / "run"
        begun: dict[str, float] = {}
        found: list[tuple[psutil.Process, Follower]] = []

        def look(done: int) -> None:
            if done < BLOCK // 2:  # the first steps fill caches
                return
            if not found:
                process, address = stack.enter_context(watcher(run_dir))
                found.append((process, Follower(address)))
            process, follower = found[0]
            mine = {child.pid for child in [process, *process.children(recursive=True)]}
            everybody = [p for p in psutil.Process().children(recursive=True) if p.pid not in mine]
            watched = (done // BLOCK) % 4 in (1, 2)  # without, with, with, without
            if begun.get("block") != done // BLOCK:
                now, its = cpu_seconds(everybody), cpu_seconds([process])
                if "block" in begun and done > begun["done"]:
                    number = done - begun["done"]
                    was = int(begun["block"]) % 4 in (1, 2)
                    blocks[was].append(((now - begun["job"]) / number, (its - begun["watcher"]) / number))
                begun.update(block=done // BLOCK, done=done, job=now, watcher=its)
            if watched:
                follower.look()

        overrides = [
            "experiment=quickstart", f"trainer.steps={steps}", f"trainer.eval_interval={steps}",
            f"trainer.checkpoint_interval={steps}", "trainer.warm_start.steps=400",
        ]  # fmt: skip
        jobs.train(run_dir, overrides, look)
    pairs = min(map(len, blocks.values()))
    lines = ["| | blocks | CPU s a step of the job | of the watcher |", "|---|--:|--:|--:|"]
    for watched, title in ((False, "nobody looks"), (True, "overview open")):
        of_job, of_watcher = zip(*blocks[watched][:pairs], strict=True)
        error = statistics.stdev(of_job) / pairs**0.5
        lines.append(
            f"| {title} | {pairs} | {statistics.mean(of_job):.3f} ± {error:.3f} | {statistics.mean(of_watcher):.3f} |"
        )
    of_pairs = [100 * (w[0] - n[0]) / n[0] for n, w in zip(blocks[False], blocks[True], strict=False)]
    error = statistics.stdev(of_pairs) / pairs**0.5
    return [
        *lines, "",
        f"The job's difference, of blocks beside each other: median {statistics.median(of_pairs):+.1f} %, mean "
        f"{statistics.mean(of_pairs):+.1f} ± {error:.1f} % (standard error).",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help=f"train a job of that many steps, in blocks of {BLOCK}")
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--model", help="a folder with a tokenizer of at least 40 tokens")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks/watch.md")
    arguments = parser.parse_args()
    if arguments.steps:
        lines = job(arguments.steps)
        print("\n".join(lines))
        if arguments.write:
            page.write("benchmarks/watch.md", "\n".join(lines), "benchmarks/watch.py job")
        return
    if not arguments.model:
        parser.error("give --model, a folder with a tokenizer of at least 40 tokens, or --steps")
    lines = ["| page | first, s | again, s |", "|---|--:|--:|"]
    with tempfile.TemporaryDirectory(prefix="megarl-watch-") as path:
        folder = Path(path)
        fill(folder, arguments.trajectories, str(Path(arguments.model).resolve()))
        run = WatchedRun(folder)

        def overview() -> object:
            return pages.overview(WatchedRun(folder).now())

        def groups(filters: str = "", words: str = "", start: GroupPlace | None = None) -> Callable[[], object]:
            return lambda: pages.groups(folder, filters, words, start, lambda *_: "")

        page_1000 = GroupPlace(arguments.trajectories // (SIZE * PER_STEP) - 6_000 // PER_STEP, 0)
        cases = {
            "overview": overview,
            "overview, not changed": lambda: run.now(),
            "groups": groups(),
            "groups, page 1,000": groups(start=page_1000),
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
