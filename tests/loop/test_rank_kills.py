"""Trainer ranks that are killed at random moments start again alone: every other process goes on, and the job learns
the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.conftest import WHOLE
from tests.loop.random_kills import killed_at_random
from tests.loop.same_run import items, learned
from tests.system.jobs import START_S, Job

KILLS = 12


@pytest.mark.soak
@pytest.mark.timeout(KILLS * START_S)
@pytest.mark.parametrize(
    "keeps",
    [
        ("trainer.checkpoint_interval=1",),
        ("trainer.checkpoint_interval=100", "trainer.keep_state=disk"),
        (
            "trainer.checkpoint_interval=1",
            "rollout.placement=colocated",
            "rollout.offload=sleep",
            "trainer.offload=memory",
        ),
        ("trainer.checkpoint_interval=1", "rollout.placement=colocated", "rollout.offload=destroy"),
    ],
)
def test_a_kill_of_a_rank_at_any_moment(tmp_path: Path, whole_job: Job, keeps: tuple[str, ...]) -> None:
    settings = [*WHOLE, *keeps]
    with killed_at_random(tmp_path / "run", settings, ("trainer 0", "trainer 1"), KILLS, 1) as (job, done):
        mine, others = items(job.run_dir), items(whole_job.run_dir)
        assert mine.keys() == others.keys()
        assert [key for key in mine if mine[key][:3] != others[key][:3]] == []
        assert learned(job.run_dir) == learned(whole_job.run_dir)
        assert done > 1 and "starting the trainer ranks again" in job.output.read_text()
