"""``cluster.restarts``: a job whose process dies, or stands still, starts again by itself from its newest
checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.jobs import START_S, TINY, Job

STEPS = 12
DPO = (
    *(
        "experiment=dpo",
        "parallel=dp2",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_interval=2",
        "trainer.eval_interval=0",
    ),
    *(setting for setting in TINY if setting.startswith(("trainer.warm_start", "taskset"))),
)
pytestmark = pytest.mark.timeout(3 * START_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path / "run", [*DPO, "cluster.restarts=2", "cluster.stall_s=10"]).start()
    yield started
    started.clean_up()


def steps(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [record["step"] for record in records if "actor/loss" in record]


def test_starts_again_and_ends(job: Job) -> None:
    job.until(lambda: max(steps(job.run_dir), default=0) >= 3, "third step")
    os.kill(job.pid_of("trainer 1"), signal.SIGKILL)
    job.until(
        lambda: (job.run_dir / "attempt").read_text() == "2" and "step 6/" in job.output.read_text(), "sixth step"
    )
    os.kill(job.pid_of("trainer 0"), signal.SIGSTOP)
    assert job.wait(START_S) == 0, job.output.read_text()
    said = job.output.read_text()
    assert "trainer rank 1 was ended by signal 9" in said
    assert "starting again from the newest checkpoint (cluster.restarts: 1 left)" in said
    assert "likely: trainer rank 0 is to blame: stopped by a signal" in said
    assert re.search(r"trainer rank 1 \| .*, step \d+ .* \| in \w+ from meg", said), (
        said
    )  # the collective in which it waits, and whose call it is
    assert "distributed_c10d.py" in (job.run_dir / "logs" / "attempt_2" / "stall_1.txt").read_text()
    assert "starting again from the newest checkpoint (cluster.restarts: 0 left)" in said
    assert (job.run_dir / "attempt").read_text() == "3"
    assert steps(job.run_dir) == list(range(1, STEPS + 1))  # none twice, none missing
    job.until_gone(30)
