"""A job that gets notice in the middle of a rollout keeps its samples, and ends with the bits of a job without
notice."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megarl.buffer.store import Store
from megarl.run.report.goodput import account_of
from tests.system.jobs import START_S, TINY, Job

ROLLOUT = "train-000001"
SETTINGS = (
    *TINY,
    "trainer.steps=3",
    "trainer.warm_start.steps=1",
    "trainer.eval_interval=0",
    "trainer.checkpoint_interval=1",
    "rollout.concurrent_groups=1",
    "rollout.segment_tokens=2",
    "rollout.max_response_tokens=24",
)


def groups(job: Job) -> dict[object, object]:
    """Group of the rollout that is ready or used -> when its responses were put."""
    which = f"rollout_id = '{ROLLOUT}' and state in ('ready', 'consumed')"
    return {group: ended for group, ended in job.query(f"select group_id, ended_at from groups where {which}")}


def responses(run_dir: Path) -> dict[tuple[str, int], list[tuple[bytes, bytes]]]:
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    found = {
        (e.group_id, e.index): [(t.token_ids.tobytes(), b"" if t.logp is None else t.logp.tobytes()) for t in e.turns]
        for step in range(3)
        for e in store.groups.trajectories(f"train-{step:06d}")
    }
    store.close()
    return found


def losses(run_dir: Path) -> list[float]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["actor/loss"] for record in records if "actor/loss" in record]


@pytest.mark.timeout(4 * START_S)
@pytest.mark.soak
def test_responses_that_a_notice_cuts_off_go_on_after_the_resume(tmp_path: Path) -> None:
    whole, job = Job(tmp_path / "whole", SETTINGS), Job(tmp_path / "stopped", SETTINGS)
    try:
        assert whole.start().wait(START_S) == 0, whole.output.read_text()
        job.start()
        job.until_step(1)
        job.until(lambda: bool(groups(job)), "a response of the second step", poll_s=0.01)
        job.signal(signal.SIGTERM)
        assert job.wait(START_S) == 130, job.output.read_text()
        before = groups(job)
        assert 0 < len(before) < 8, "the notice came in the middle"
        assert "goodput: " in job.output.read_text()
        assert job.start().wait(START_S) == 0, job.output.read_text()
        assert groups(job).items() > before.items(), "none is sampled again"
        assert responses(job.run_dir) == responses(whole.run_dir)
        assert losses(job.run_dir) == losses(whole.run_dir)
        spent = account_of(job.run_dir)
        assert spent is not None and sum(spent.seconds.values()) == pytest.approx(spent.wall_s)
        [lost] = spent.notices()
        assert lost["notice"] > 0 and lost["start"] > 0 and spent.seconds["notice"] == pytest.approx(lost["notice"])
    finally:
        for one in (whole, job):
            if one.has_started:
                one.clean_up()
