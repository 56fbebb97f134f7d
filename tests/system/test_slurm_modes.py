"""``slurm/train_async.sh`` on a real Slurm: store, two explore programs and trainer on nodes of their own. Explore and
trainer are stopped in turn, with notice (SIGTERM) or without (SIGKILL), and queued again; every step is made once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.jobs import TINY
from tests.system.slurm_cluster import NODES, SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]
HOME = Path(__file__).parents[2]
PATIENCE_S = 400.0
STEPS = 24
STOPS = (
    ("explore-0", "TERM"),
    ("train", "TERM"),
    ("explore-0", "KILL"),
    ("train", "KILL"),
    ("explore-1", "TERM"),
    ("train", "TERM"),
)


def until(what: Callable[[], bool], name: str, logs: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, f"no {name}:\n" + "\n".join(p.read_text() for p in logs.glob("*.log"))
        time.sleep(0.5)


def test_jobs_of_one_run_are_stopped_and_queued_again(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.fail(reason, pytrace=False)
    run_dir = tmp_path / "run"
    env = {"MEGARL_SETUP": f"venv:{sys.prefix}", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    overrides = (*TINY, f"trainer.steps={STEPS}", f"run.dir={run_dir}")

    def steps() -> list[int]:
        path = run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [int(record["step"]) for record in records if "actor/pg_loss" in record]

    with SlurmCluster(tmp_path / "slurm") as cluster:

        def submit(part: str, node: str, *arguments: str) -> int:
            options = ["--oversubscribe", "--cpus-per-task=2", f"--nodelist={node}"]
            output, words = f"--output={tmp_path}/{part}.log", ["slurm/train_async.sh", *arguments, *overrides]
            kind = part.partition("-")[0]
            return cluster.submit(output, *options, *words, cwd=HOME, env={**env, "MEGARL_PART": kind})

        def await_steps(count: int, name: str) -> None:
            before = len(steps())
            until(lambda: len(steps()) >= before + count, name, tmp_path)

        # explore programs wait for both others
        jobs = {f"explore-{i}": submit(f"explore-{i}", node, "--number", str(i)) for i, node in enumerate(NODES[1::2])}
        jobs |= {"train": submit("train", NODES[2]), "store": submit("store", NODES[0])}
        asked = Counter[str]()
        for part, how in STOPS:
            await_steps(2, f"step before {part} is stopped")
            if how == "TERM":
                cluster.run("scancel", "--signal=TERM", str(jobs[part]))
                asked[part] += 1
                log, count = tmp_path / f"{part}.log", asked[part]
                until(lambda log=log, count=count: log.read_text().count("queued again") == count, "requeue", tmp_path)  # type: ignore[misc]
                continue
            cluster.run("scancel", "--signal=KILL", "--full", str(jobs[part]))  # the job's script dies as well
            until(lambda part=part: cluster.state(jobs[part]) not in ("RUNNING", "COMPLETING"), "end", tmp_path)  # type: ignore[misc]
            if part != "train":
                await_steps(2, "step with the other explore program alone")
            cluster.run("scontrol", "requeue", str(jobs[part]))  # as an administrator would
        for part, job in jobs.items():
            assert cluster.wait(job, PATIENCE_S) == "COMPLETED", (tmp_path / f"{part}.log").read_text()
    assert steps() == list(range(1, STEPS + 1))
