"""The job scripts on a real Slurm of four nodes: jobs over two of them, and what ends them before their end.

Jobs run side by side where they can: most of their time is imports and Slurm's waiting. What stops them is done in
threads, while tests wait for other jobs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.buffer.order.draws import tasks_of_step
from megarl.buffer.store import OWN_SERVER, Store
from megarl.core.errors import ConfigError
from megarl.run.job_store import job_store, live_url
from megarl.run.local_disk import PARKED
from megarl.weights.checkpoint.training.manifest import current_attempt
from tests.conftest import SOAK
from tests.system.jobs import TINY, last_of_each
from tests.system.slurm_cluster import NODES, SlurmCluster, missing
from tests.system.soak import NOT_COMPARED

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
HOME = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (HOME / "slurm").glob("*.sh") if path.name != "common.sh")
KEY = "the key of the jobs of these tests"
ENV = {"MEGARL_SETUP": f"venv:{sys.prefix}", "MEGARL_JOB_KEY": KEY, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
STEPS = 24 if SOAK else 16
DPO = (
    *(
        "experiment=dpo",
        "parallel=dp2",
        f"trainer.steps={STEPS}",
        "trainer.tasks_per_step=16",
        "trainer.checkpoint_interval=1",
        "trainer.eval_interval=0",
    ),
    *(setting for setting in TINY if setting.startswith(("trainer.warm_start", "taskset"))),
)
GRPO = (*TINY, "parallel=tp2", "rollout.tp=2", "rollout.nodes=2", "trainer.steps=3", "trainer.checkpoint_interval=1")
FORKS = "run.fork_servers=false"
"""Over several nodes nothing is forked, and each command would import torch for it."""
SHARED = ("--oversubscribe", "--cpus-per-task=2")
"""The scripts ask for whole nodes; jobs of these tests run side by side."""
TASKS = 8
"""Of a rollout of the quickstart made TINY."""
Answer = tuple[str, int, list[int], float | None]
PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (reason := missing()) is not None:
        pytest.fail(reason, pytrace=False)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def on(*nodes: str) -> tuple[str, ...]:
    """Options of a job on these nodes, or of a component of one."""
    return (*SHARED, f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}")


class Submitted:
    """One job of a script of ours, and the run that it makes."""

    def __init__(
        self,
        cluster: SlurmCluster,
        script: str,
        run_dir: Path,
        *overrides: str,
        options: Sequence[str] = SHARED,
        line: Sequence[str] = (),
        log: str = "",
    ) -> None:
        """``line``: words for ``sbatch`` in place of script and overrides. ``log``: name of the job's output, else the
        run's."""
        self.cluster, self.run_dir = cluster, run_dir
        self.output = run_dir.with_name(f"{log or run_dir.name}.log")
        self._still = 0
        overrides = tuple(
            last_of_each([f"run.dir={run_dir}", "cluster.stall_s=3600", *overrides])
        )  # it is not to end what a test holds
        words = line or (f"slurm/{script}", *overrides)
        self.number = cluster.submit(f"--output={self.output}", *options, *words, cwd=HOME, env=ENV)

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def steps(self) -> int:
        return max((int(record["step"]) for record in self.metrics() if "actor/loss" in record), default=0)

    def until(self, what: Callable[[], bool], name: str, every_s: float = 0.2) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"no {name}: {self.said()}"
            assert self.cluster.state(self.number) not in ("FAILED", "COMPLETED", "CANCELLED"), self.said()
            time.sleep(every_s)

    def said(self) -> str:
        return self.output.read_text() if self.output.is_file() else "(nothing)"

    def stand_still(self) -> None:
        """Rank 1 does, and so does the training: Slurm looks at limits and nodes a few times a minute only."""
        (self._still,) = [
            pid for pid in self._pids() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ]
        os.kill(self._still, signal.SIGSTOP)

    def go_on(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._still, signal.SIGCONT)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.stand_still()
        try:
            yield
        finally:
            self.go_on()

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
        return int(self.shown("Restarts"))

    def times(self) -> tuple[str, str]:
        """Start and end, which sort as texts."""
        return self.shown("StartTime"), self.shown("EndTime")

    def run_minutes(self) -> int:
        """Whole minutes since the start."""
        hours, minutes, _ = self.shown("RunTime").split(":")
        return 60 * int(hours) + int(minutes)

    def shown(self, name: str) -> str:
        return self.cluster.run("scontrol", "show", "job", str(self.number)).partition(f"{name}=")[2].split()[0]


class Beside(NamedTuple):
    """Jobs that nothing stops."""

    components: Submitted
    sweep: tuple[Path, int]
    """Its directory, and the number of its array."""

    def whole(self) -> Path:
        """Run directory of the combination that is ``DPO`` on one node."""
        return self.sweep[0] / f"trainer.steps={STEPS}"


@pytest.fixture(scope="module")
def beside(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """All of them are submitted at once."""
    folder = tmp_path_factory.mktemp("beside")
    overrides = (*TINY, "parallel=tp2", "trainer.steps=2")
    both = (*on(NODES[0]), ":", *on(NODES[1]))
    components = Submitted(cluster, "train_hetjob.sh", folder / "components", *overrides, options=both)
    sweep = folder / "sweep"
    settings = [setting for setting in DPO if not setting.startswith("trainer.steps=")]
    argv = ["slurm/array_sweep.sh", *settings, f"trainer.steps=1,{STEPS}", f"run.dir={sweep}"]
    options = f"--parsable --output={folder}/task_%a.log {' '.join(on(NODES[3]))}"
    said = cluster.run(*argv, cwd=HOME, env={**ENV, "SBATCH_ARGS": options, "PARALLEL": "2"})
    return Beside(components, (sweep, int(said.split()[-1])))


class Refused(NamedTuple):
    """A job on one node that needs two."""

    job: Submitted
    line: list[str]
    """Words of the ``sbatch`` line that its refusal prints."""


@pytest.fixture(scope="module")
def refused(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Refused:
    run_dir = tmp_path_factory.mktemp("stopped") / "killed"
    store = f"store.folder={run_dir.parent}"  # PostgreSQL's data, as where run.dir is on Lustre
    job = Submitted(cluster, "train_grpo.sh", run_dir, *GRPO, FORKS, store, log="refused")
    assert cluster.wait(job.number, PATIENCE_S) == "FAILED"
    [line] = [line for line in job.said().splitlines() if "to run it as it is: " in line]
    return Refused(job, shlex.split(line.partition("to run it as it is: ")[2]))


class Stopped(NamedTuple):
    """Jobs over two nodes each that are queued again, and what does that to them."""

    limited: Submitted
    next: Submitted
    """The second job of a chain, after ``limited``."""
    limiting: Future[None]
    killed: Submitted
    killing: Future[Before]


@pytest.fixture(scope="module")
def stopped(cluster: SlurmCluster, beside: Beside, refused: Refused) -> Iterator[Stopped]:
    """Each on nodes of its own, so that both are stopped at the same time. ``killed`` is the line of a refusal."""
    chain = ("--dependency=singleton", "--job-name=chain", *on(*NODES[2:]))
    limited, following = (
        Submitted(
            cluster, "train_dpo.sh", refused.job.run_dir.with_name("limited"), *DPO, FORKS, options=chain, log=log
        )
        for log in ("limited", "next")
    )
    where = (*SHARED, f"--nodelist={','.join(NODES[:2])}")  # beside other jobs of the tests
    killed = Submitted(cluster, "train_grpo.sh", refused.job.run_dir, options=where, line=refused.line[1:])
    with ThreadPoolExecutor(2) as pool:
        limiting = pool.submit(stop_at_the_limit, cluster, limited, following)
        killing = pool.submit(kill_the_head, cluster, killed, beside.components)
        yield Stopped(limited, following, limiting, killed, killing)


def test_scripts_are_accepted(cluster: SlurmCluster) -> None:
    assert len(SCRIPTS) >= 7
    for script in SCRIPTS:
        cluster.run("sbatch", "--test-only", str(script), cwd=HOME)


@pytest.mark.parametrize(
    ("options", "needs", "words"),
    [
        ((), "9", "has 8 CPUs (SLURM_JOB_CPUS_PER_NODE=8), megarl needs 9"),
        (("--oversubscribe", "--cpus-per-task=1"), "", "has 1 CPUs (SLURM_JOB_CPUS_PER_NODE=1), megarl needs 2"),
    ],
    ids=["whole nodes", "one core a node"],
)
def test_cpus_that_a_job_gets(
    cluster: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    needs: str,
    words: str,
) -> None:
    """The scripts' own lines give all CPUs of a node; a job with fewer than it needs ends before it starts anything.
    Nothing here confines a job to them: that needs Slurm's cgroup plugins (docs/cluster.md)."""
    monkeypatch.setitem(ENV, "MEGARL_CPUS", needs)
    job = Submitted(cluster, "train_grpo.sh", tmp_path / "run", options=options)
    assert cluster.wait(job.number, PATIENCE_S) == "FAILED"
    assert words in job.said()


def test_a_job_that_needs_two_nodes_is_told_how_to_get_them(cluster: SlurmCluster, refused: Refused) -> None:
    """The scripts ask for one node. ``killed`` is the job of that line, which runs to its end."""
    assert "NumNodes=1" in cluster.run("scontrol", "show", "job", str(refused.job.number))
    assert refused.line[:2] == ["sbatch", "--nodes=2"] and refused.line[2].endswith("slurm/train_grpo.sh")
    assert {f"run.dir={refused.job.run_dir}", "rollout.nodes=2"} <= set(refused.line[3:])


def test_a_sweep_as_an_array(cluster: SlurmCluster, beside: Beside) -> None:
    """Each task runs one combination, in a directory of its own, to its end."""
    folder, array = beside.sweep
    deadline = time.monotonic() + PATIENCE_S
    while (states := cluster.states(array)).keys() != {0, 1} or not set(states.values()) <= {"COMPLETED", "FAILED"}:
        assert time.monotonic() < deadline, states
        time.sleep(0.5)
    logs = [(folder.parent / f"task_{task}.log").read_text() for task in range(2)]
    assert states == {0: "COMPLETED", 1: "COMPLETED"}, "\n".join(logs)
    for task, (steps, log) in enumerate(zip((1, STEPS), logs, strict=True)):
        run_dir = folder / f"trainer.steps={steps}"
        assert f"combination {task}: trainer.steps={steps}" in log
        assert (run_dir / "hf" / "config.json").is_file()
        assert json.loads((run_dir / "resolved.json").read_text())["trainer"]["steps"] == steps


@pytest.mark.usefixtures("stopped")
def test_trainer_and_engines_in_components_of_their_own(beside: Beside) -> None:
    job = beside.components
    job.completed()
    said = job.output.read_text()
    assert "node 0 node1: trainer ranks 0-1, explorer and reward workers" in said
    assert "node 1 node2: engine 0, reward workers" in said


def test_queued_again_at_the_time_limit(stopped: Stopped) -> None:
    """The job has saved a checkpoint; in ``make soak``, ``scancel --signal`` and a killed node daemon stop it too."""
    stopped.limiting.result()
    assert stopped.limited.restarts() == 1 + 2 * SOAK
    assert stopped.limited.said().count("stopping: saving") == 1 + SOAK


def test_queued_again_when_a_node_daemon_is_killed(stopped: Stopped) -> None:
    before = stopped.killing.result()
    assert stopped.killed.restarts() == 1
    assert [record["step"] for record in before.metrics if "actor/loss" in record] == [1]


def test_the_same_model_in_the_end(beside: Beside, stopped: Stopped) -> None:
    """Offline: a trainer alone computes the same bits every time, so the model is that of a run that nothing stopped,
    which has its ranks on one node."""
    job = stopped.limited
    job.completed()
    assert job.restarts() == 1 + 2 * SOAK
    models = [(run_dir / "hf" / "model.safetensors").read_bytes() for run_dir in (beside.whole(), job.run_dir)]
    assert models[0] == models[1]
    assert [record["step"] for record in job.metrics() if "actor/loss" in record] == list(range(1, STEPS + 1))


def test_the_same_answers_in_the_end(stopped: Stopped) -> None:
    """Online: a TP rank and an engine's worker on each node; the rollout of the step that the kill interrupts was there
    before, and the answers of the one that takes its place are the same."""
    job, before = stopped.killed, stopped.killing.result()
    job.completed()
    assert job.restarts() == 1
    assert current_attempt(job.run_dir) > before.attempt
    assert "node 1 node2: trainer rank 1, engine 0 (part 2 of 2), reward workers" in job.said()
    trained = [record for record in job.metrics() if "actor/loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3]
    assert all(record["sync/digests"] > 0 for record in trained)
    assert [compared(record) for record in before.metrics if "actor/loss" in record] == [compared(trained[0])]
    assert (job.run_dir / "postgres" / "data" / PARKED).is_file() and not [
        *job.run_dir.parent.glob("megarl-postgres-*")
    ]
    with job_store(OWN_SERVER, job.run_dir, KEY, host="127.0.0.1"):
        store = Store(OWN_SERVER)
        assert answers(store, 1) == before.answers
        tasks = store.tasks.ids("train")
        for step in range(3):
            assert [task for task, index, *_ in answers(store, step) if index == 0] == tasks_of_step(
                tasks, step, TASKS, 1
            )
            assert store.rollouts.progress(rollout(step)) == (TASKS, TASKS)
        store.close()


def test_the_next_job_of_a_chain_begins_when_the_first_has_ended(cluster: SlurmCluster, stopped: Stopped) -> None:
    """It waited while the first was queued again, and finds the run finished."""
    stopped.limiting.result()
    stopped.next.completed()
    assert stopped.next.times()[0] >= stopped.limited.times()[1]
    assert f"{stopped.limited.run_dir} is finished" in stopped.next.said()


def stop_at_the_limit(cluster: SlurmCluster, job: Submitted, following: Submitted) -> None:
    """End when the job is in the queue again, in ``make soak`` after two further stops."""
    job.until(lambda: job.steps() >= 3, "third step")
    if SOAK:
        cluster.run("scancel", "--signal=TERM", str(job.number))
        job.until(lambda: job.said().count("queued again") == 1, "requeue after scancel --signal")
        until_next_step(job)
    stops = job.said().count("stopping: saving")
    with job.held():
        # The scripts' signal comes 180 s before the limit, so at once, and two minutes or more are left.
        limit = job.run_minutes() + 3
        cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
        job.until(lambda: job.said().count("stopping: saving") > stops, "signal before the time limit")
    job.until(lambda: job.said().count("queued again") == 1 + SOAK, "requeue at the time limit")
    assert (cluster.state(following.number), following.shown("Reason")) == ("PENDING", "Dependency")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    if SOAK:
        until_next_step(job)
        with job.held(), killed_daemon(cluster, NODES[2]):
            job.until(lambda: cluster.state(job.number) == "PENDING", "requeue after the node's end")


class Before(NamedTuple):
    """Of a job, when a node's daemon is killed."""

    answers: list[Answer]
    """Of the rollout that the step to come is trained with."""
    metrics: list[dict[str, float]]
    attempt: int


def kill_the_head(cluster: SlurmCluster, job: Submitted, other: Submitted) -> Before:
    """The daemon of the node of the head, when ``other`` no longer needs it."""
    found = stand_still_behind_second_rollout(job)
    before = Before(found, job.metrics(), current_attempt(job.run_dir))
    other.completed()
    with killed_daemon(cluster, NODES[0]):
        job.until(lambda: cluster.state(job.number) == "PENDING", "requeue after the node's end")
    job.go_on()
    return before


@contextmanager
def killed_daemon(cluster: SlurmCluster, node: str) -> Iterator[None]:
    """What jobs have on the node lives on, and must not go on."""
    cluster.kill_node(node)
    try:
        yield
    finally:
        cluster.start_node(node)


def until_next_step(job: Submitted) -> None:
    stopped_at = job.steps()
    job.until(lambda: job.steps() > stopped_at, "step after the stop")


def stand_still_behind_second_rollout(job: Submitted) -> list[Answer]:
    """The answers of the rollout that the second step is trained with, while rank 1 stands still and the step is not
    trained."""
    job.until(lambda: live(job) is not None, "store")
    store = Store(str(live(job)))
    job.until(lambda: store.rollouts.progress(rollout(1))[1] > 0, "second rollout", every_s=0.02)
    job.stand_still()
    job.until(lambda: store.rollouts.progress(rollout(1)) == (TASKS, TASKS), "its answers")
    assert job.steps() == 1, "it was too late to interrupt the second step"
    found = answers(store, 1)
    store.close()
    return found


def live(job: Submitted) -> str | None:
    with suppress(ConfigError):  # it is starting
        return live_url(job.run_dir, KEY)
    return None


def rollout(step: int) -> str:
    return f"train-{step:06d}"


def answers(store: Store, step: int) -> list[Answer]:
    return [
        (e.task_id, e.index, e.response.token_ids.tolist(), e.reward.score)
        for e in store.groups.trajectories(rollout(step))
    ]


def compared(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if not NOT_COMPARED.match(name)}
