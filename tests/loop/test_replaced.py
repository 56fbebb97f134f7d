"""One job loses one of its two explorers in a rollout, its engine in the next one, and the engine that replaced it in
a sync: it goes on, in its first attempt. Then a trainer rank is killed in a rollout, and its ranks alone start again,
from the state that the node keeps after each step: there is no checkpoint.
Everything that it has sampled and trained is what a job has that lost nothing. Its trajectories are an agent's, which
asks the endpoint once, as the other's own workflow asks the model. Engines that end by order: ``test_cold.py``,
``test_scale.py``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megarl.buffer.store import Store
from tests.loop.conftest import HELD_OUT, WHOLE
from tests.loop.held import Held
from tests.loop.same_run import groups, has, items, kill, learned
from tests.system.jobs import START_S, Job, unread

pytestmark = pytest.mark.timeout(3 * START_S)
AGENT = """
import openai

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=3600.0, max_retries=0)


async def run(base_url, prompt, request_kwargs, metadata):
    await client.with_options(base_url=base_url).chat.completions.create(messages=prompt, **request_kwargs)
"""


def is_whole(job: Job, rollout: str) -> bool:
    return groups(job, rollout, "ready") == 8


def others(job: Job) -> list[int]:
    """Engine and explorers, which outlive trainer ranks."""
    return [job.pid_of(role) for role in ("engine", "explorer 0", "explorer 1")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("replaced")
    agent, held = folder / "agent.py", Held(folder)
    agent.write_text(AGENT)
    by_agent = ["rollout.workflow=agent", f"rollout.agent={agent}", "rollout.explorers=2"]
    held.hold("train")
    keeps = ["trainer.keep_state=neighbour", "trainer.checkpoint_interval=100", "cluster.restarts=1"]
    job = Job(folder / "run", [*WHOLE, *by_agent, *held.settings, *keeps]).start()
    try:
        job.until(lambda: held.holds("train"), "the first step's rollout")
        with job.stopped(*job.trainers()):
            kill(job, "explorer", job.pid_of("explorer 0"))
            job.until(lambda: has(job, "explorer 0"), "another explorer in its place")
            held.release("train")
            job.until(lambda: is_whole(job, "train-000000"), "the end of the rollout")
            explorers = [job.pid_of(f"explorer {number}") for number in range(2)]
            for pid in explorers:
                os.kill(pid, signal.SIGSTOP)
        job.until(lambda: groups(job, "train-000001", "pending") == 8, "the second step's rollout")
        engine, port = job.pid_of("engine"), job.port_of_engine()
        os.kill(engine, signal.SIGSTOP)
        for pid in explorers:
            os.kill(pid, signal.SIGCONT)
        job.until(lambda: any(unread(port, pid, "server") for pid in explorers), "a request that no engine has read")
        held.hold("train")
        kill(job, "engine 0", engine)
        job.until(lambda: held.holds("train"), "an engine that generates again")
        with job.stopped(*(trainers := job.trainers())):
            held.release("train")
            job.until(lambda: is_whole(job, "train-000001"), "the end of the rollout")
            engine, port = job.pid_of("engine"), job.port_of_engine()
            os.kill(engine, signal.SIGSTOP)
            held.hold("train")
        job.until(lambda: unread(port, trainers[0], "server"), "a sync's call that no engine has read")
        kill(job, "engine 0", engine)
        job.until(lambda: held.holds("train"), "an engine that was given the weights")
        kept = others(job)
        assert (job.run_dir / "attempt").read_text() == "1"
        kill(job, "trainer rank 1", job.pid_of("trainer 1"))
        job.until(lambda: (job.run_dir / "attempt").read_text() == "2", "the ranks' next attempt")
        held.release("train")
        job.until(lambda: "resumed from" in job.output.read_text(), "new ranks")
        assert others(job) == kept, "a process other than a trainer rank was started again"
        job.wait(START_S)
        yield job
    finally:
        job.clean_up()


def test_it_ends_and_no_process_but_the_lost_ones_and_the_ranks_was_replaced(job: Job) -> None:
    said = job.output.read_text()
    assert job.poll() == 0, said
    assert (job.run_dir / "attempt").read_text() == "2"
    assert (
        "cluster.replacements: 2 left" in said
        and "published 1.2 again" in said
        and "an engine died in a weight sync" in said
    )
    assert "starting the trainer ranks again from the newest checkpoint (cluster.restarts: 0 left)" in said
    assert f"resumed from {job.run_dir}/checkpoints/kept/global_step_2" in said
    assert not (job.run_dir / "checkpoints" / "kept").exists()
    job.until_gone(60)


def test_the_engine_was_lost_while_it_was_asked(job: Job) -> None:
    store = Store(f"sqlite:///{job.run_dir}/store.db")
    asked_again = store.journal.events("engine_retry")
    store.close()
    assert asked_again


def test_no_trajectory_is_lost_doubled_or_another(job: Job, whole_job: Job) -> None:
    """But for the number of the attempt in its weights' versions."""
    assert whole_job.poll() == 0
    mine, theirs = ({key: [*e[:3], *e[4:]] for key, e in items(j.run_dir).items()} for j in (job, whole_job))
    assert len(theirs) == 2 * HELD_OUT + 3 * 64
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if mine[key] != theirs[key]] == []


def test_every_group_was_claimed_by_an_explorer_of_the_job(job: Job) -> None:
    """Of two, one may take all before the other is there, and after it was killed."""
    workers = {worker for (worker,) in job.query("select distinct claimed_by from groups")}
    assert workers and workers <= {"explorer-0", "explorer-1"}


def test_the_same_was_learned(job: Job, whole_job: Job) -> None:
    assert learned(job.run_dir) == learned(whole_job.run_dir)
