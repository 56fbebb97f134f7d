"""Engines that take turns with the trainer: one job whose engine ends and starts in every step, loses it in a rollout
and is killed whole; resumed, its engine sleeps, and dies asleep. It samples and learns what a job does whose engine
stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.core.config import compose
from megarl.core.errors import ConfigError
from megarl.explore.store import EngineStatus, Store
from megarl.learn import algorithms
from megarl.run.checks.devices import ledger_of
from megarl.run.checks.job import check
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.loop.conftest import WHOLE
from tests.loop.same_run import groups, items, kill, learned
from tests.system.jobs import START_S, Job, last_of_each

pytestmark = pytest.mark.timeout(3 * START_S)
COLOCATED = (*WHOLE, "rollout.placement=colocated")


def is_engine(run_dir: Path, state: EngineStatus) -> bool:
    store = Store(f"sqlite:///{run_dir}/store.db")
    try:
        return store.own_engines()[0].state is state
    finally:
        store.close()


def nearest(budget: str, run_dir: Path) -> list[str]:
    """Settings that the refusal of a job whose models all stay gives."""
    with pytest.raises(ConfigError) as refused:
        check(compose([*last_of_each(COLOCATED), budget, f"run.dir={run_dir}"]), dry=True)
    return str(refused.value).partition("nearest that fits: ")[2].split()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, whole_job: Job) -> Iterator[Job]:
    """Begins with the plan that fits the smallest device on which it can run."""
    run_dir = tmp_path_factory.mktemp("colocated") / "run"
    away = ["trainer.offload=memory", "reference.offload=memory"]
    config = compose([*last_of_each(COLOCATED), *away])
    ledger = ledger_of(config, algorithms.get("grpo"), read_hf_config(whole_job.run_dir / "model"))
    budget = f"cluster.device_bytes={ledger.largest().total}"
    assert sorted(nearest(budget, run_dir)) == sorted(away)
    job = Job(run_dir, [*COLOCATED, "rollout.offload=destroy", budget, *away])
    job.start()
    try:
        job.until(lambda: groups(job, "eval-before", "claimed") > 0, "a rollout", poll_s=0.002)
        kill(job, "engine 0", job.pid_of("engine"))
        job.until(lambda: len(job.steps()) == 2, "two steps, and a checkpoint")
        job.until(lambda: is_engine(run_dir, EngineStatus.ABSENT), "a phase without an engine", poll_s=0.01)
        job.kill_all()
        job = Job(run_dir, [*COLOCATED, "rollout.offload=sleep", "trainer.offload=disk", "reference.offload=memory"])
        job.start()
        job.until(lambda: groups(job, "train-000002", "claimed") > 0, "a rollout", poll_s=0.002)
        engine = job.pid_of("engine")
        job.until(lambda: is_engine(run_dir, EngineStatus.ASLEEP), "an engine that sleeps", poll_s=0.005)
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
        job.wait(START_S)
        yield job
    finally:
        job.clean_up()


def test_it_goes_on(job: Job) -> None:
    said = job.output.read_text()
    assert job.poll() == 0, said
    assert (job.run_dir / "attempt").read_text() == "2" and "engine 0 was ended by signal 9" in said
    assert not (job.run_dir / "offload").exists() and job.processes() == {}


def test_it_samples_and_learns_what_another_job_does(job: Job, whole_job: Job) -> None:
    assert whole_job.poll() == 0
    mine, others = items(job.run_dir), items(whole_job.run_dir)
    assert mine.keys() == others.keys()
    assert [key for key in mine if mine[key][:3] != others[key][:3]] == []  # versions have the attempt's number
    assert learned(job.run_dir) == learned(whole_job.run_dir)
