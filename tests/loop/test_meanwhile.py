"""Evaluations while training goes on (``trainer.eval_engines``): whole jobs with two engines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from megarl.buffer.store import Store
from megarl.buffer.store.tables import GROUPS, ROLLOUTS, STEPS
from megarl.core.schema import WeightsVersion
from tests.loop.held import Held
from tests.loop.same_run import steps_of
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
STEPS_OF_JOB, BOUND, TASKS = 5, 2, 8
SETTINGS = (
    *TINY,
    "model.from_scratch.max_position_embeddings=256",
    f"trainer.steps={STEPS_OF_JOB}",
    "trainer.tasks_per_step=4",
    "trainer.updates_per_step=1",
    "trainer.warm_start.steps=1",  # a model that seldom ends by itself
    "trainer.eval_interval=2",
    "trainer.eval_engines=1",
    "rollout.max_response_tokens=96",
    "rollout.max_num_seqs=8",
    "rollout.replicas=2",
    "sync.order=completion",
    "sync.pause=keep",
    f"sync.max_staleness={BOUND}",
    "algorithm.correction=truncate",
    f"taskset.eval_size={TASKS}",
    "evaluation.samples=4",
    "evaluation.temperature=1.0",
)


class Found:
    """What a job has left behind."""

    def __init__(self, run_dir: Path) -> None:
        store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
        self.evaluations = [event for event in store.journal.events("evaluation")]
        self.lost = [event["data"]["step"] for event in store.journal.events("evaluation_lost")]
        self.asked = {row.rollout_id: row for row in store.database.read(lambda c: c.execute(select(ROLLOUTS)).all())}
        self.recorded = {
            row.step: row.recorded_at for row in store.database.read(lambda c: c.execute(select(STEPS)).all())
        }
        self.spans: dict[str, list[set[WeightsVersion]]] = {}
        for rollout in self.asked:
            trajectories = [
                e for part in store.groups.parts(store.groups.ids(rollout)) for e in store.groups.read(part)
            ]
            self.spans[rollout] = [{s.version for turn in e.turns for s in turn.spans} for e in trajectories]
        query = select(GROUPS).where(GROUPS.c.state == "consumed", GROUPS.c.rollout_id.like("train-%"))
        self.lags: list[int] = []
        for group in store.database.read(lambda c: c.execute(query).all()):
            versions = {s.version for e in store.groups.read([group.group_id]) for turn in e.turns for s in turn.spans}
            self.lags += [group.used_by - 1 - step for step in store.pacing.version_steps(versions).values()]
        store.close()
        self.metrics: dict[int, dict[str, Any]] = {}
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            if "val/accuracy" in (record := json.loads(line)):
                assert record["step"] not in self.metrics
                self.metrics[record["step"]] = record

    def check(self, steps: Sequence[int]) -> None:
        """Each evaluation has answers of one version, and is reported under its step; no token is too old."""
        assert sorted(self.metrics) == [event["data"]["step"] for event in self.evaluations] == list(steps)
        assert min(self.lags) >= 0 and max(self.lags) <= BOUND
        for event in self.evaluations:
            data = event["data"]
            asked = self.asked[data["rollout_id"]]
            assert self.spans[data["rollout_id"]] == [{WeightsVersion.parse(asked.version)}] * TASKS * 4
            assert self.metrics[data["step"]]["val/accuracy"] == data["accuracy"]

    def meanwhile(self, step: int) -> int:
        """Steps recorded between the request for an evaluation and its end."""
        [event] = [event for event in self.evaluations if event["data"]["step"] == step]
        asked = self.asked[event["data"]["rollout_id"]].requested_at
        return sum(asked < at < event["at"] for at in self.recorded.values())


def test_steps_are_made_while_an_evaluation_is_open(tmp_path: Path) -> None:
    """That of step 2 is held open until the third step is recorded."""
    held = Held(tmp_path)
    held.hold("eval")
    held.hold("train")
    job = Job(tmp_path / "run", (*SETTINGS, *held.settings)).start()
    try:
        job.until(lambda: held.holds("eval"), "the evaluation before the first step")
        held.release("eval")
        job.until(lambda: held.holds("train"), "the first step's rollout")
        held.hold("eval")
        held.release("train")
        job.until(lambda: 3 in job.steps(), "the third step")
        held.release("eval")
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    found = Found(tmp_path / "run")
    found.check([0, 2, 4, STEPS_OF_JOB])
    assert len(steps_of(tmp_path / "run")) == STEPS_OF_JOB and not found.lost
    assert found.meanwhile(2) > 0 == found.meanwhile(0)
    assert found.metrics[2]["val/steps_meanwhile"] >= 1
    assert "engine_retry" not in job.output.read_text()


@pytest.mark.soak
def test_an_evaluation_whose_engine_is_killed(tmp_path: Path) -> None:
    """Weights of a later step are evaluated in its place; the explorer lives on.

    The evaluation is held open until its engine's death is noticed. A held answer of training keeps step 7 from its
    end until then, so the later step comes before the next evaluation that is due."""
    held = Held(tmp_path)
    held.hold("train")
    settings = [*SETTINGS, *held.settings, "trainer.steps=8", "trainer.eval_interval=4"]
    job = Job(tmp_path / "run", settings).start()
    try:
        job.until(lambda: held.holds("train"), "the first step's rollout")
        held.hold("eval")
        asked = "select sampling from rollouts where rollout_id = 'eval-4'"
        held.until(job, "train", lambda: bool(job.query(asked)), "an evaluation")
        job.until(lambda: held.holds("eval"), "an answer of the evaluation")
        explorer = job.pid_of("explorer")
        [url] = json.loads(str(job.query(asked)[0][0]))["engines"]
        assert job.query(f"select number from engines where url = '{url}'") == [(0,)]
        port = url.rpartition(":")[2]
        servers = {pid: words for pid, words in job.processes().items() if "megarl.engines.server.server" in words}
        [server] = [pid for pid, words in servers.items() if f"--port {port}" in words and os.getsid(pid) == pid]
        os.kill(server, signal.SIGKILL)
        job.until(lambda: bool(job.query("select 1 from events where kind = 'evaluation_lost'")), "the loss noticed")
        held.release("eval")
        held.release("train")
        assert job.wait(START_S) == 0, job.output.read_text()
        assert explorer not in job.processes() and "explorer was ended" not in job.output.read_text()
    finally:
        job.clean_up()
    found = Found(tmp_path / "run")
    assert found.lost == [4] and "the evaluation of step 4 is given up" in job.output.read_text()
    assert 4 not in found.metrics and any(4 < step < 8 for step in found.metrics)
    found.check(sorted(found.metrics))
