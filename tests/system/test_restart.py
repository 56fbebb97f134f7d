"""``cluster.restarts``: a job whose process dies starts again by itself from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.jobs import START_S, TINY, Job

STEPS = 12
DPO = (
    *("experiment=dpo", "parallel=dp2", f"trainer.steps={STEPS}", "trainer.checkpoint_interval=2", "trainer.eval_interval=0"),
    *(setting for setting in TINY if setting.startswith(("trainer.warm_start", "taskset"))),
)
pytestmark = pytest.mark.timeout(3 * START_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path / "run", [*DPO, "cluster.restarts=1"]).start()
    yield started
    started.clean_up()


def steps(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [record["step"] for record in records if "actor/loss" in record]


def test_starts_again_and_ends(job: Job) -> None:
    job.until(lambda: max(steps(job.run_dir), default=0) >= 3, "third step")
    os.kill(job.pid_of("trainer 1"), signal.SIGKILL)
    assert job.wait(START_S) == 0, job.output.read_text()
    said = job.output.read_text()
    assert "trainer rank 1 was ended by signal 9" in said
    assert "starting again from the newest checkpoint (cluster.restarts: 0 left)" in said
    assert (job.run_dir / "attempt").read_text() == "2"
    assert steps(job.run_dir) == list(range(1, STEPS + 1))  # none twice, none missing
    job.until_gone(30)
