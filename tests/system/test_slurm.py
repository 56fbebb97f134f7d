"""The job scripts on a real Slurm of two nodes: jobs over both, and what ends them before their end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megarl.launch.run_dir import current_attempt
from tests.system.jobs import TINY
from tests.system.slurm_cluster import NODES, SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
HOME = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (HOME / "slurm").glob("*.sh") if path.name != "common.sh")
ENV = {"MEGARL_SETUP": f"venv:{sys.prefix}"}
STEPS = 24
DPO = (
    *("experiment=dpo", "parallel=dp2", f"trainer.steps={STEPS}", "trainer.tasks_per_step=16", "trainer.checkpoint_interval=1", "trainer.eval_interval=0"),
    *(setting for setting in TINY if setting.startswith(("trainer.warm_start", "taskset"))),
)
PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (reason := missing()) is not None:
        pytest.fail(reason, pytrace=False)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Submitted:
    """One job of a script of ours, and the run that it makes."""

    def __init__(self, cluster: SlurmCluster, script: str, run_dir: Path, *overrides: str, options: Sequence[str] = ()) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        self.output = run_dir.with_suffix(".log")
        self.number = cluster.submit(*options, f"--output={self.output}", f"slurm/{script}", f"run.dir={run_dir}", *overrides, cwd=HOME, env=ENV)

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
        return self.output.read_text() if self.output.is_file() else "(nothing)"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Rank 1 stands still, and so does the training: Slurm looks at limits and nodes a few times a minute only."""
        (pid,) = [pid for pid in self._pids() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pids(self) -> Iterator[int]:
        """Trainer ranks: the processes themselves, not those that write a checkpoint for them."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                leads = os.getsid(int(folder.name)) == int(folder.name)
                if leads and b"trainer" in words and f"{self.run_dir}/resolved.json".encode() in words:
                    yield int(folder.name)

    def completed(self) -> None:
        state = self.cluster.wait(self.number, PATIENCE_S)
        assert state == "COMPLETED", f"{state}: {self.said()}"

    def restarts(self) -> int:
        return int(self.cluster.run("scontrol", "show", "job", str(self.number)).partition("Restarts=")[2].split()[0])


def test_scripts_are_accepted(cluster: SlurmCluster) -> None:
    assert len(SCRIPTS) >= 7
    for script in SCRIPTS:
        cluster.run("sbatch", "--test-only", str(script), cwd=HOME)


def test_quickstart_over_both_nodes_with_an_engine_over_both(cluster: SlurmCluster, tmp_path: Path) -> None:
    """TP2 x DP2 trainer ranks, an engine of TP2 with a worker on each node, every sync proven by digests."""
    job = Submitted(
        cluster, "train_grpo.sh", tmp_path / "run", *TINY, "parallel.tp=2", "parallel.dp=2", "rollout.tp=2", "rollout.nodes=2", "trainer.steps=2"
    )  # fmt: skip
    job.completed()
    assert "node 1 node2: trainer ranks 2-3, engine 0 (part 2 of 2), reward workers" in job.said()
    trained = [record for record in job.metrics() if "actor/loss" in record]
    assert [record["step"] for record in trained] == [1, 2]
    assert all(record["sync/digests"] > 0 for record in trained)


def test_trainer_and_engines_in_components_of_their_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Submitted(cluster, "train_async.sh", tmp_path / "run", *TINY, "parallel=tp2", "trainer.steps=2")
    job.completed()
    said = job.output.read_text()
    assert "node 0 node1: trainer ranks 0-1, explorer and reward workers" in said
    assert "node 1 node2: engine 0, reward workers" in said


def test_stopped_in_three_ways_and_the_same_in_the_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    """``scancel --signal``, the time limit and a killed node daemon each put the job into the queue again. A trainer alone computes the
    same bits every time, so the model is that of a run that nothing stopped, which has its ranks on one node."""
    whole = Submitted(cluster, "train_dpo.sh", tmp_path / "whole", *DPO, options=["--nodes=1", f"--nodelist={NODES[1]}"])
    job = Submitted(cluster, "train_dpo.sh", tmp_path / "run", *DPO)
    job.until(lambda: job.steps() >= 3, "third step")
    cluster.run("scancel", "--signal=TERM", str(job.number))
    job.until(lambda: job.said().count("queued again") == 1, "requeue after scancel --signal")

    stopped_at = job.steps()
    job.until(lambda: job.steps() > stopped_at, "step after the first stop")
    stops = job.said().count("stopping: saving")
    with job.held():
        cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=3")  # the scripts' signal comes 180 s before the limit
        job.until(lambda: job.said().count("stopping: saving") > stops, "signal before the time limit")
    job.until(lambda: job.said().count("queued again") == 2, "requeue at the time limit")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")

    stopped_at = job.steps()
    job.until(lambda: job.steps() > stopped_at, "step after the second stop")
    attempt = current_attempt(job.run_dir)
    with job.held():
        cluster.kill_node(NODES[0])  # the head's: what the job has there lives on, and must not go on
        try:
            job.until(lambda: cluster.state(job.number) == "PENDING", "requeue after the node's end")
        finally:
            cluster.start_node(NODES[0])
    job.completed()
    whole.completed()
    assert (job.restarts(), whole.restarts()) == (3, 0)
    assert current_attempt(job.run_dir) > attempt
    models = [(run.run_dir / "hf" / "model.safetensors").read_bytes() for run in (whole, job)]
    assert models[0] == models[1]
    steps = [record["step"] for record in job.metrics() if "actor/loss" in record]
    assert steps == list(range(1, STEPS + 1))
