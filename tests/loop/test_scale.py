"""One job gets a second engine while it trains, loses it by a kill, has it again, and goes on without it: no step waits
for it, no group is lost, and every step trains on what engines with proven weights have sampled."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from megarl.buffer.store import Store
from megarl.engines.fleet import EngineRow, EngineStatus
from megarl.run.launch.scale import scale
from tests.loop.same_run import steps_of
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
SETTINGS = (*TINY, "trainer.eval_interval=1000", "trainer.checkpoint_interval=10")
UNTIL_STOPPED = "trainer.steps=1000000"
"""The test ends the job with SIGTERM."""


class Scaled:
    """A job, the orders for its engines, and what has become of them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = Store(f"sqlite:///{job.run_dir}/store.db", read_only=True)

    def engine(self, number: int) -> EngineRow | None:
        return next((engine for engine in self.store.engines.own() if engine.number == number), None)

    def order(self, engines: int) -> None:
        scale(str(self.job.run_dir), [f"engines={engines}"])

    def until(self, state: EngineStatus) -> None:
        """Wait until engine 1 is so."""

        def is_so() -> bool:
            engine = self.engine(1)
            if engine is None:
                return state is EngineStatus.ABSENT
            return engine.state is state and engine.is_done

        self.job.until(is_so, f"engine 1 {state}")

    def kill(self, number: int) -> bool:
        """Kill the server of an engine; return False where it is dead."""
        engine = self.engine(number)
        assert engine is not None
        port = engine.url.rpartition(":")[2]
        words = ("megarl.engines.server.server", port)
        pids = [p for p, command in self.job.processes().items() if all(word in command for word in words)]
        for pid in pids[:1]:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def joins(self) -> int:
        """Publications in which engine 1 took part."""
        return (self.job.run_dir / "logs" / "attempt_1" / "engine_1.log").read_text().count("PAUSED_NEW")

    def until_joined(self) -> None:
        before = self.joins()
        self.job.until(lambda: self.joins() > before, "engine 1 joined")

    def more_steps(self, count: int) -> None:
        self.job.until_step(max(self.job.steps(), default=0) + count)


def check_whole(run_dir: Path, steps: int) -> None:
    """Every step is there once, each trained on 8 groups of its own, whose samples have its weights."""
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    records = steps_of(run_dir)
    assert [record["training/global_step"] for record in records] == [float(s + 1) for s in range(steps)]
    assert all(0 <= record["sync/probe_diff_max"] < 1e-3 for record in records)
    for step in range(steps):
        found = store.groups.trajectories(f"train-{step:06d}")
        assert len({(e.group_id, e.index) for e in found}) == len(found) == 8 * len({e.index for e in found}) > 0
        assert len({span.version for e in found for span in e.response.spans}) == 1
    store.close()


@pytest.mark.soak
def test_an_engine_comes_dies_and_leaves_while_the_job_trains(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", [*SETTINGS, UNTIL_STOPPED]).start()
    try:
        job.until_step(1)
        scaled = Scaled(job)
        with job.stopped(job.pid):  # the engine is ordered, and nobody starts it
            scaled.order(2)
            scaled.more_steps(2)
        scaled.until(EngineStatus.SERVING)
        explorer = job.run_dir / "logs" / "attempt_1" / "explorer.log"
        engine = scaled.engine(1)
        assert engine is not None
        job.until(lambda: f"the engine at {engine.url} samples\n" in explorer.read_text(), "samples of engine 1")
        assert scaled.kill(1)
        job.until(lambda: "engine 1 was ended by signal 9" in job.output.read_text(), "the death of engine 1")
        scaled.more_steps(1)
        scaled.until(EngineStatus.SERVING)
        scaled.until_joined()
        scaled.order(1)
        scaled.until(EngineStatus.ABSENT)
        scaled.more_steps(2)
        job.signal(signal.SIGTERM)
        assert job.wait(START_S) == 130
    finally:
        job.clean_up()
    said = job.output.read_text()
    assert (job.run_dir / "attempt").read_text() == "1", said
    assert "engine 1 is started" in said and "engine 1 is ended, as ordered" in said
    check_whole(job.run_dir, max(job.steps()))


@pytest.mark.soak
def test_engines_get_other_workers_while_the_job_trains(tmp_path: Path) -> None:
    """Two engines of one worker get two each, in turn, and one of them has one again."""
    job = Job(tmp_path / "run", [*SETTINGS, UNTIL_STOPPED]).start()
    try:
        job.until_step(1)
        scaled, orders = Scaled(job), Store(f"sqlite:///{job.run_dir}/store.db")
        scaled.order(2)
        scaled.until(EngineStatus.SERVING)
        scaled.until_joined()
        orders.engines.scale("train", 2, 2)  # four workers are more than `megarl scale` has room for here
        scaled.until(EngineStatus.SERVING)  # the second, which begins when the first serves
        scaled.until_joined()
        wider = job.output.read_text()
        scale(str(job.run_dir), ["engines=1", "tp=1"])
        narrow = lambda: [(e.number, e.workers) for e in orders.engines.own() if e.is_done]  # noqa: E731
        job.until(lambda: narrow() == [(0, 1)], "engine 0 with one worker, and no other")
        orders.close()
        scaled.more_steps(2)
        job.signal(signal.SIGTERM)
        assert job.wait(START_S) == 130
    finally:
        job.clean_up()
    said = job.output.read_text()
    for engine in range(2):
        assert f"engine {engine} has 2 workers instead of 1" in said
    assert "engine 0 has 1 workers instead of 2" in said
    assert "joining the engine that is new" not in wider, "the other one goes on"
    check_whole(job.run_dir, max(job.steps()))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_steps_with_an_engine_that_comes_and_goes(tmp_path: Path) -> None:
    """Every few steps engine 1 is ordered or killed, or engine 0 is killed while engine 1 serves."""
    draws = random.Random(0)
    job = Job(tmp_path / "run", [*SETTINGS, UNTIL_STOPPED, "reward.workers=1"]).start()
    try:
        job.until_step(1)
        scaled = Scaled(job)
        while max(job.steps()) < 90:
            engine = scaled.engine(1)
            serves = engine is not None and engine.state is EngineStatus.SERVING
            what = draws.choice(["leave", "kill 1", "kill 0"]) if serves else "come"
            if what in ("leave", "come"):
                scaled.order(1 if what == "leave" else 2)
            else:
                scaled.kill(int(what[-1]))
            scaled.more_steps(draws.randint(3, 6))
        job.signal(signal.SIGTERM)
        assert job.wait(START_S) == 130, job.output.read_text()
    finally:
        job.clean_up()
    assert (job.run_dir / "attempt").read_text() == "1", job.output.read_text()
    check_whole(job.run_dir, max(job.steps()))
