"""Whoever is killed, in whatever moment of phases and moves, a job whose memory takes turns goes on with the same
bits."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.loop.conftest import WHOLE
from tests.loop.same_run import has, items, learned
from tests.system.jobs import START_S, Job

KILLS = 16
LONGEST_S = 4.0
"""A step takes about one."""


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
        "cluster.restarts=100",
        "cluster.replacements=100",
        "trainer.checkpoint_interval=1",
    ]
    random_ = random.Random(offload)
    job = Job(tmp_path / "run", settings).start()
    try:
        for kill in range(KILLS):
            victim = ("trainer 0", "trainer 1", "engine", "supervisor")[kill % 4]
            wait_for(job, "engine" if victim == "engine" else "trainer 0", tmp_path / "run" / "offload")
            time.sleep(random_.uniform(0, LONGEST_S))
            if job.poll() is not None:
                break
            with suppress(AssertionError, ProcessLookupError, FileNotFoundError):  # absent just now
                os.kill(job.pid if victim == "supervisor" else job.pid_of(victim), signal.SIGKILL)
            if victim == "supervisor":
                job.wait(30)
                job.until_gone(60)
                job = Job(tmp_path / "run", settings).start()
        assert job.wait(START_S) == 0, job.output.read_text()
        assert not (tmp_path / "run" / "offload").exists() and job.processes() == {}
        mine, others = items(job.run_dir), items(whole_job.run_dir)
        assert mine.keys() == others.keys()
        assert [key for key in mine if mine[key][:3] != others[key][:3]] == []
        assert learned(job.run_dir) == learned(whole_job.run_dir)
    finally:
        job.clean_up()


def wait_for(job: Job, role: str, moves: Path) -> None:
    """Wait until a process is there and moves have begun, or the job has ended."""
    end = time.monotonic() + START_S
    while not (has(job, role) and moves.is_dir()) and job.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
