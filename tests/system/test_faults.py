"""Processes of a job are killed or interrupted while it trains: it ends, says why, leaves nothing behind, and goes on.

All tests share one run directory: each start after the first is a resume of what the test before left.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.weights.checkpoint.training.state import latest, read_state
from tests.system.jobs import START_S, TINY, Job

BOUND_S = 30.0
"""From a death to the end of the whole job: what a job promises."""
pytestmark = pytest.mark.timeout(3 * START_S)
MIX = ("algorithm=mix", "algorithm.group_size=8", "algorithm.expert_ratio=0.2", "parallel=cp2")
"""No other job has expert rows, or context parallelism."""
COMMAND = (*MIX, "trainer.steps=8", "trainer.warm_start.steps=120", "trainer.warm_start.checkpoint_interval=10")
ENDLESS = (*MIX, "trainer.steps=100000")
Start = Callable[..., Job]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "run"


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    """Start the job in the shared directory; whatever of it lives after the test is killed."""
    jobs: list[Job] = []

    def start(*overrides: str) -> Job:
        jobs.append(Job(run_dir, [*TINY, "run.allow_changes=[trainer.warm_start]", *overrides]).start())
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()


def training(job: Job) -> Job:
    """Wait until a step of this start is done."""
    before = max(job.steps(), default=0)
    job.until(lambda: max(job.steps(), default=0) > before and bool(job.processes()), f"a step after {before}")
    return job


def newest_log(run_dir: Path, name: str) -> Path:
    """What a process of the newest attempt printed."""
    attempt = (run_dir / "attempt").read_text()
    return run_dir / "logs" / f"attempt_{attempt}" / f"{name.replace(' rank', '').replace(' ', '_')}.log"


def finished_checkpoint(run_dir: Path) -> int:
    """The step of the newest finished checkpoint."""
    found = latest(run_dir / "checkpoints")
    assert found is not None
    state = read_state(found)
    assert state["phase"] == "rl"
    return int(state["step"])


def warm_start_steps(run_dir: Path) -> list[int]:
    """Steps of the warm start whose metrics were written."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line["step"] for line in lines if "sft/loss" in line]


def test_interrupted_warm_start_is_saved(start: Start, run_dir: Path) -> None:
    job = start(*COMMAND)
    job.until(lambda: latest(run_dir / "checkpoints" / "warm_start"), "a checkpoint of the warm start")
    job.signal(signal.SIGINT)
    assert job.wait(START_S) == 130, job.output.read_text()
    job.until_gone(BOUND_S)
    found = latest(run_dir / "checkpoints" / "warm_start")
    assert found is not None
    saved = read_state(found)
    assert (saved["phase"], saved["step"], saved["kl_coef"]) == ("warm_start", len(warm_start_steps(run_dir)), None)


def test_interrupted_job_resumes_without_a_gap(start: Start, run_dir: Path) -> None:
    """Ctrl-C reaches the supervisor alone. The same command goes on where the interrupted one ended."""
    saved = latest(run_dir / "checkpoints" / "warm_start")
    job = training(start(*COMMAND))
    assert f"resumed from {saved}" in job.output.read_text()
    assert warm_start_steps(run_dir) == list(range(1, 121))
    assert not (run_dir / "checkpoints" / "warm_start").exists()
    job.signal(signal.SIGINT)
    job.wait(START_S)
    assert job.poll() == 130, job.output.read_text()
    job.until_gone(BOUND_S)
    assert "run the same command again to resume" in job.output.read_text()
    done = finished_checkpoint(run_dir)
    assert 1 <= done < 8
    assert job.steps() == list(range(1, done + 1))

    again = start(*COMMAND)
    assert again.wait(START_S) == 0, again.output.read_text()
    again.until_gone(BOUND_S)
    assert f"resumed from {run_dir}/checkpoints/global_step_{done}" in again.output.read_text()
    assert finished_checkpoint(run_dir) == 8
    assert again.steps() == list(range(1, 9))
    steps = [json.loads(str(text)) for (text,) in again.query("select metrics from steps order by step")]
    assert [found["training/attempt"] for found in steps] == [2] * done + [3] * (8 - done)
    assert all({"actor/pg_loss", "actor/sft_loss"} <= found.keys() and found["actor/grad_norm"] > 0 for found in steps)
    rollouts = [f"train-{step:06d}" for step in range(8)]
    asked = again.query("select rollout_id, version from rollouts where kind = 'train' order by step")
    assert [rollout for rollout, _ in asked] == rollouts
    assert len({version for _, version in asked}) == 8
    sources = again.query("select number, count(*) from experts group by number")
    assert len(sources) == 1 and sources[0][1] > 0, "one import, which no later start has repeated"


def test_finished_job_says_so_and_starts_nothing(start: Start, run_dir: Path) -> None:
    job = start(*COMMAND)
    assert job.wait(60) == 0, job.output.read_text()
    assert "is finished" in job.output.read_text()
    other = start(*COMMAND, "algorithm.kl.coef=0.5")
    assert other.wait(60) == 2, other.output.read_text()
    assert "finished run with other settings: algorithm.kl.coef was 0.2, now 0.5" in other.output.read_text()
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["attempt_1", "attempt_2", "attempt_3"]


def dies(job: Job, role: str, name: str) -> None:
    """Kill one process of a job: the job ends in time, says whose death it was and shows what that process printed
    last."""
    segments = job.shared_memory()
    since = time.monotonic()
    os.kill(job.pid_of(role), signal.SIGKILL)
    assert job.wait(BOUND_S) == 1, job.output.read_text()
    job.until_gone(BOUND_S - (time.monotonic() - since))
    assert not [path for path in segments if path.exists()]
    said = job.output.read_text()
    assert f"megarl train: {name} was ended by signal 9; its last lines" in said
    log = newest_log(job.run_dir, name)
    assert str(log) in said
    printed = [line for line in log.read_text().replace("\r", "\n").splitlines() if line.strip()]
    assert (printed[-1] if printed else "it printed nothing") in said.split("its last lines")[1]


def until_a_sync(job: Job) -> None:
    """Wait for the beginning of the next one."""
    engine_log = newest_log(job.run_dir, "engine 0")
    syncs = engine_log.read_text().count("PAUSED_NEW")
    job.until(lambda: engine_log.read_text().count("PAUSED_NEW") > syncs, "a sync", poll_s=0.002)


def test_a_stop_of_all_processes_in_a_sync_is_saved(start: Start, run_dir: Path) -> None:
    """As ``scancel --signal=TERM`` does it: engines and explorer end too, and none takes their place. No other
    checkpoint is due."""
    job = training(start(*ENDLESS, "trainer.checkpoint_interval=100000", "sync.bucket_bytes=4096"))
    pids = [job.pid, *job.processes()]
    until_a_sync(job)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert job.wait(START_S) == 130, job.output.read_text()
    assert finished_checkpoint(run_dir) == job.steps()[-1]
    job.until_gone(BOUND_S)


def test_killed_supervisor_takes_the_job_with_it(start: Start, run_dir: Path) -> None:
    """At the beginning of a sync: an engine that is told to end then waits forever for the call that it never
    answered."""
    job = training(start(*ENDLESS))
    until_a_sync(job)
    segments = job.shared_memory()
    since = time.monotonic()
    job.signal(signal.SIGKILL)
    job.wait(BOUND_S)
    again = start(*ENDLESS)  # at once: it waits until the others have let go of the directory
    job.until_gone(BOUND_S - (time.monotonic() - since))
    assert not [path for path in segments if path.exists()]
    training(again)
    assert again.steps() == list(range(1, again.steps()[-1] + 1))
    dies(again, "trainer 1", "trainer rank 1")
