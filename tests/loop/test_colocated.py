"""Engines that take turns with the trainer: one job whose engine ends and starts in every step, loses it in a rollout
and is killed whole; resumed, its engine sleeps, outlives the trainer's ranks, and dies asleep. It samples and learns
what a job does whose engine stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megarl.buffer.store import Store
from megarl.config import compose
from megarl.core.errors import ConfigError
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn
from megarl.learn import algorithms
from megarl.run.checks.job import check
from megarl.run.checks.memory import ledger_of
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.loop.conftest import WHOLE
from tests.loop.held import Held
from tests.loop.same_run import groups, items, kill, learned
from tests.system.jobs import START_S, Job, last_of_each, unread

pytestmark = pytest.mark.timeout(3 * START_S)
COLOCATED = (*WHOLE, "rollout.placement=colocated")


def row_of(run_dir: Path) -> EngineRow:
    with closing(Store(f"sqlite:///{run_dir}/store.db")) as store:
        return store.engines.own()[0]


def sleeps(run_dir: Path) -> bool:
    row = row_of(run_dir)
    return row.turn is EngineTurn.ASLEEP and row.is_done


def turn(job: Job) -> object:
    """EngineTurn that the engine is ordered to take."""
    [[state]] = job.query("select turn from engines")
    return state


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
    held = Held(run_dir.parent)
    held.hold("eval")
    held.hold("train")
    job = Job(run_dir, [*COLOCATED, *held.settings, "rollout.offload=destroy", budget, *away])
    job.start()
    try:
        job.until(lambda: held.holds("eval"), "a rollout")
        kill(job, "engine 0", job.pid_of("engine"))
        held.release("eval")
        held.until(job, "train", lambda: len(job.steps()) == 2, "the third rollout, behind a checkpoint")
        with job.stopped(job.pid):  # the trainer's order stays undone
            held.release("train")
            job.until(lambda: turn(job) == "away", "an order for the engine to end")
            for trainer in job.trainers():  # they wait for that, and order nothing else
                os.kill(trainer, signal.SIGSTOP)
        job.until(lambda: row_of(run_dir).state is EngineStatus.ABSENT, "a phase without an engine")
        job.kill_all()
        with closing(Store(f"sqlite:///{run_dir}/store.db")) as store:
            store.rollouts.discard(2)  # its samples would be kept, and nothing left to hold
        held.hold("train")
        sleep = ["rollout.offload=sleep", "trainer.offload=disk", "reference.offload=memory", "cluster.restarts=1"]
        job = Job(run_dir, [*COLOCATED, *held.settings, *sleep])
        job.start()
        job.until(lambda: held.holds("train"), "a rollout")
        engine, port = job.pid_of("engine"), job.port_of_engine()
        os.kill(job.pid_of("trainer 1"), signal.SIGKILL)
        job.until(lambda: sleeps(run_dir), "an engine that sleeps for new ranks")
        job.until(
            lambda: job.query("select 1 from versions where version = '3.1' and live = 1"), "weights of new ranks"
        )
        assert job.pid_of("engine") == engine
        trainers = job.trainers()
        with job.stopped(*trainers):
            held.release("train")
            job.until(lambda: groups(job, "train-000002", "ready") == 8, "the end of the rollout")
            os.kill(engine, signal.SIGSTOP)
        with job.stopped(engine):
            job.until(lambda: unread(port, trainers[0], "server"), "a call that the engine has not read")
            job.until(
                lambda: row_of(run_dir).turn is EngineTurn.ASLEEP and row_of(run_dir).is_done,
                "an order for the engine to sleep",
            )
            for trainer in trainers:
                os.kill(trainer, signal.SIGSTOP)
        job.until(lambda: unread(port, trainers[0], "client"), "the answer of an engine that sleeps")
        os.kill(engine, signal.SIGKILL)
        for trainer in trainers:
            os.kill(trainer, signal.SIGCONT)
        job.wait(START_S)
        yield job
    finally:
        job.clean_up()


def test_it_goes_on(job: Job) -> None:
    said = job.output.read_text()
    assert job.poll() == 0, said
    assert (job.run_dir / "attempt").read_text() == "3" and "engine 0 was ended by signal 9" in said
    assert not (job.run_dir / "offload").exists()
    job.until_gone(60)


def test_it_samples_and_learns_what_another_job_does(job: Job, whole_job: Job) -> None:
    assert whole_job.poll() == 0
    mine, others = items(job.run_dir), items(whole_job.run_dir)
    assert mine.keys() == others.keys()
    assert [key for key in mine if mine[key][:3] != others[key][:3]] == []  # versions have the attempt's number
    assert learned(job.run_dir) == learned(whole_job.run_dir)
