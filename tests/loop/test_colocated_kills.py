"""Whoever is killed, in whatever moment of phases and moves, a job whose memory takes turns goes on with the same
bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.conftest import WHOLE
from tests.loop.random_kills import SUPERVISOR, killed_at_random
from tests.loop.same_run import items, learned
from tests.system.jobs import START_S, Job

KILLS = 16
VICTIMS = ("trainer 0", "trainer 1", "engine", SUPERVISOR)


@pytest.mark.soak
@pytest.mark.timeout(KILLS * START_S)
@pytest.mark.parametrize("offload", ["sleep", "destroy"])
def test_a_kill_at_any_moment(tmp_path: Path, whole_job: Job, offload: str) -> None:
    settings = [
        *WHOLE,
        "rollout.placement=colocated",
        f"rollout.offload={offload}",
        "trainer.offload=disk",
        "reference.offload=disk",
        "trainer.checkpoint_interval=1",
    ]
    moves = tmp_path / "run" / "offload"
    with killed_at_random(tmp_path / "run", settings, VICTIMS, KILLS, offload, begun=moves.is_dir) as (job, _):
        assert not moves.exists()
        job.until_gone(60)
        mine, others = items(job.run_dir), items(whole_job.run_dir)
        assert mine.keys() == others.keys()
        assert [key for key in mine if mine[key][:3] != others[key][:3]] == []
        assert learned(job.run_dir) == learned(whole_job.run_dir)
