"""The job scripts on a real Slurm of two nodes: jobs over both, and what ends them before their end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.checkpoint.state import latest
from tests.system.jobs import TINY
from tests.system.slurm_cluster import NODES, SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
HOME = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (HOME / "slurm").glob("*.sh") if path.name != "common.sh")
ENV = {"MEGARL_SETUP": f"venv:{sys.prefix}"}
DPO = ("experiment=dpo", *(setting for setting in TINY if not setting.startswith(("experiment", "rollout", "trainer.updates"))))
PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (reason := missing()) is not None:
        pytest.fail(reason, pytrace=False)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Submitted:
    """One job of a script of ours, and the run that it makes."""

    def __init__(self, cluster: SlurmCluster, script: str, run_dir: Path, *overrides: str) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        self.output = run_dir.with_suffix(".log")
        self.number = cluster.submit(f"--output={self.output}", f"slurm/{script}", f"run.dir={run_dir}", *overrides, cwd=HOME, env=ENV)

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def steps(self) -> int:
        return max((int(record["step"]) for record in self.metrics() if "actor/loss" in record), default=0)

    def until(self, what: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"no {name}: {self.said()}"
            assert self.cluster.state(self.number) not in ("FAILED", "COMPLETED", "CANCELLED"), self.said()
            time.sleep(0.2)

    def said(self) -> str:
        return self.output.read_text()[-3000:] if self.output.is_file() else "(nothing)"

    def completed(self) -> None:
        state = self.cluster.wait(self.number, PATIENCE_S)
        assert state == "COMPLETED", f"{state}: {self.said()}"

    def restarts(self) -> int:
        return int(self.cluster.run("scontrol", "show", "job", str(self.number)).partition("Restarts=")[2].split()[0])


def test_scripts_are_accepted(cluster: SlurmCluster) -> None:
    assert len(SCRIPTS) >= 8
    for script in SCRIPTS:
        cluster.run("sbatch", "--test-only", str(script), cwd=HOME)


def test_quickstart_over_both_nodes_with_an_engine_over_both(cluster: SlurmCluster, tmp_path: Path) -> None:
    """TP2 x DP2 trainer ranks, an engine of TP2 with a worker on each node; stopped once and queued again."""
    job = Submitted(
        cluster, "train_grpo.sh", tmp_path / "run", *TINY, "parallel.tp=2", "parallel.dp=2", "rollout.tp=2", "rollout.nodes=2", "trainer.steps=6"
    )  # fmt: skip
    job.until(lambda: job.steps() >= 2, "second step")
    cluster.run("scancel", "--signal=TERM", str(job.number))
    job.completed()
    assert job.restarts() == 1
    said = job.output.read_text()
    assert "node 1 node2: trainer ranks 2-3, engine 0 (part 2 of 2)" in said
    assert "queued again" in said
    steps = [record["step"] for record in job.metrics() if "actor/loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]  # none twice, none missing
    assert all(record["sync/digests"] > 0 for record in job.metrics() if "sync/digests" in record)


def test_trainer_and_engines_in_components_of_their_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Submitted(cluster, "train_async.sh", tmp_path / "run", *TINY, "parallel=tp2", "trainer.steps=2")
    job.completed()
    said = job.output.read_text()
    assert "node 0 node1: trainer ranks 0-1, explorer and reward workers" in said
    assert "node 1 node2: engine 0, reward workers" in said


@pytest.fixture(scope="module")
def uninterrupted(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of a DPO run over both nodes to its end: a trainer alone computes the same bits every time."""
    job = Submitted(cluster, "train_dpo.sh", tmp_path_factory.mktemp("reference") / "run", *DPO, "parallel=dp2", f"trainer.steps={DPO_STEPS}")
    job.completed()
    return (job.run_dir / "hf" / "model.safetensors").read_bytes()


DPO_STEPS = 120


def test_time_limit(cluster: SlurmCluster, tmp_path: Path, uninterrupted: bytes) -> None:
    """Slurm's signal before the limit: a checkpoint, another turn, the same model."""
    job = Submitted(cluster, "train_dpo.sh", tmp_path / "run", *DPO, "parallel=dp2", f"trainer.steps={DPO_STEPS}")
    job.until(lambda: job.steps() >= 3, "third step")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=3")  # less than the 180 s before which the signal comes
    job.until(lambda: "queued again" in job.said(), "requeue")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.completed()
    assert job.restarts() == 1
    assert (job.run_dir / "hf" / "model.safetensors").read_bytes() == uninterrupted


def test_killed_node_daemon(cluster: SlurmCluster, tmp_path: Path, uninterrupted: bytes) -> None:
    """The head's daemon is gone, its processes are not: the requeued job fences them, and ends with the same model."""
    job = Submitted(cluster, "train_dpo.sh", tmp_path / "run", *DPO, "parallel=dp2", f"trainer.steps={DPO_STEPS}")
    job.until(lambda: latest(job.run_dir / "checkpoints") is not None and job.steps() >= 3, "checkpoint")
    cluster.kill_node(NODES[0])
    try:
        job.until(lambda: cluster.state(job.number) == "PENDING", "requeue")
    finally:
        cluster.start_node(NODES[0])
    job.completed()
    assert job.restarts() >= 1
    assert (job.run_dir / "hf" / "model.safetensors").read_bytes() == uninterrupted
