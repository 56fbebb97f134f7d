"""One run of three programs on one store: explore-0 starts before its trainer, is killed in a rollout and started
again; the trainer is killed and started again; explore-1 joins, and is killed for good in the last rollout. What was
sampled and trained is what a job has that was one program and lost nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from megarl.buffer.store import Store
from tests.loop.conftest import WHOLE
from tests.loop.held import Held
from tests.loop.same_run import groups, items, learned
from tests.system.jobs import START_S, Job

pytestmark = pytest.mark.timeout(3 * START_S)
STEPS = 3


class Programs(NamedTuple):
    """A run that has ended, by its programs' last starts."""

    train: Job
    explore: Job
    claimed_by: Counter[Any]
    """Groups of the last rollout that each explorer held or had put when explore-1 was killed."""
    seconds: float


@pytest.fixture(scope="module", params=["direct", pytest.param("checkpoint", marks=pytest.mark.soak)])
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Programs]:
    folder, began, started = tmp_path_factory.mktemp("modes"), time.monotonic(), list[Job]()
    held = Held(folder)
    settings = (*WHOLE, *held.settings, "cluster.heartbeat_s=2", "rollout.concurrent_groups=2", "reward.backlog=16")
    settings = (*settings, f"sync.method={request.param}")

    def start(*command: str) -> Job:
        own = ("run.mode=train",) if command == ("train",) else ()
        started.append(Job(folder / "run", [*settings, *own], command).start())
        return started[-1]

    try:
        explore = start("explore")
        explore.until(lambda: "waiting for `megarl train" in explore.output.read_text(), "a wait for the run")
        held.hold("train")
        train = start("train")
        train.until(lambda: held.holds("train"), "the first rollout")
        train.until(lambda: groups(train, "train-000000", "ready") > 0, "a group that is done")
        explore.kill_all()
        assert groups(train, "train-000000", "ready") < 8, "the rollout was over before its explorer was killed"
        held.hold("train")
        explore = start("explore")
        held.until(train, "train", lambda: groups(train, "train-000001", "claimed") > 0, "the second rollout")
        train.kill_all()
        held.hold("train", "all")
        other = start("explore", "--number", "1")
        assert explore.poll() is None, "the explore program ended with its trainer"
        train = start("train")
        last = "select claimed_by from groups where rollout_id = 'train-000002' and claimed_by is not null"
        claimed_by = Counter[Any]()

        def both() -> bool:
            claimed_by.clear()
            claimed_by.update(row[0] for row in train.query(last))
            return len(claimed_by) == 2

        third = "select 1 from groups where rollout_id = 'train-000002'"
        held.until(train, "train", lambda: bool(train.query(third)), "the third rollout", "all")
        train.until(both, "both explorers in a rollout")  # reward.backlog: none takes them all
        other.kill_all()
        held.release("train")
        train.wait(START_S)
        explore.wait(START_S)
        yield Programs(train, explore, claimed_by, time.monotonic() - began)
    finally:
        for job in started:
            job.clean_up()


def test_each_program_ends_in_order(run: Programs) -> None:
    assert run.train.poll() == 0, run.train.output.read_text()
    assert run.explore.poll() == 0, run.explore.output.read_text()
    run.train.until_gone(60)
    run.explore.until_gone(60)


def test_the_steps_are_those_of_the_plan_and_no_group_is_trained_twice(run: Programs) -> None:
    assert run.train.steps() == list(range(1, STEPS + 1))
    used = run.train.query("select used_by, group_id from groups where used_by > 0")
    assert Counter(step for step, _ in used) == dict.fromkeys(range(1, STEPS + 1), 8)
    assert len({group for _, group in used}) == len(used)


def test_attempts_are_each_programs_own(run: Programs) -> None:
    folder = run.train.run_dir
    found = {path.name: path.read_text() for path in folder.glob("attempt*") if path.suffix != ".lock"}
    assert found == {"attempt": "2", "attempt_explore-0": "2", "attempt_explore-1": "1"}
    assert (folder / "key").stat().st_mode & 0o777 == 0o600


def test_two_explorers_worked_and_one_took_over_from_the_other(run: Programs) -> None:
    assert set(run.claimed_by) == {"explorer_explore-0", "explorer_explore-1"}
    store = Store(f"sqlite:///{run.train.run_dir}/store.db")
    assert {engine.url for engine in store.engines.read(["explore-0"])} == set(), "it left its engines in the registry"
    store.close()


def test_no_trajectory_is_lost_doubled_or_another(run: Programs, whole_job: Job) -> None:
    """But for the number of the trainer's attempt in its weights' versions."""
    assert whole_job.poll() == 0
    mine, others = ({key: [*e[:3], *e[4:]] for key, e in items(job.run_dir).items()} for job in (run.train, whole_job))
    assert mine.keys() == others.keys()
    assert [key for key in mine if mine[key] != others[key]] == []


def test_the_same_was_learned(run: Programs, whole_job: Job) -> None:
    assert learned(run.train.run_dir) == learned(whole_job.run_dir)
