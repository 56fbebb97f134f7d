"""``slurm/train_async.sh`` on a real Slurm: store, explore program and trainer on nodes of their own. Explore and
trainer are stopped in turn and queued again; every step is made once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.jobs import TINY
from tests.system.slurm_cluster import NODES, SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]
HOME = Path(__file__).parents[2]
PATIENCE_S = 400.0
STEPS, STOPS = 24, 3


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
            return cluster.submit(output, *options, *words, cwd=HOME, env={**env, "MEGARL_PART": part})

        explore = submit("explore", NODES[1], "--number", "0")  # it waits for both others
        jobs = {"explore": explore, "train": submit("train", NODES[2]), "store": submit("store", NODES[0])}
        for stop in range(2 * STOPS):
            part = ("explore", "train")[stop % 2]
            before = len(steps())
            until(lambda before=before: len(steps()) > before + 1, "step after the last stop", tmp_path)  # type: ignore[misc]
            cluster.run("scancel", "--signal=TERM", str(jobs[part]))
            log, count = tmp_path / f"{part}.log", stop // 2 + 1
            until(lambda log=log, count=count: log.read_text().count("queued again") == count, "requeue", tmp_path)  # type: ignore[misc]
        for part, job in jobs.items():
            assert cluster.wait(job, PATIENCE_S) == "COMPLETED", (tmp_path / f"{part}.log").read_text()
    assert steps() == list(range(1, STEPS + 1))
