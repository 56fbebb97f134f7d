"""A job whose rewards come from another program, group by group, trains as one with a verifier of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.rewards import compute_score
from tests.loop.same_run import steps_of
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
STEPS = 3
SETTINGS = (*TINY, f"trainer.steps={STEPS}", "reward.routes={reasoning_gym: late}", "sync.max_staleness=1")


def give(job: Job, file: Path) -> int:
    """Reward what awaits it, as a person would: by the file that the run writes; return the number of rows."""
    here = [*SETTINGS, f"run.dir={job.run_dir}"]
    assert main(["data", "awaiting", str(file), *here]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["score"] = compute_score(row["data_source"], row["response"], row["ground_truth"])["score"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not rows or main(["data", "reward", str(file), *here]) == 0
    file.unlink()  # one with scores is not overwritten
    return len(rows)


def test_a_job_trains_on_rewards_that_come_later(tmp_path: Path) -> None:
    """Killed once the first rewards are given, it goes on with these from the checkpoint before the first step."""
    job = Job(tmp_path / "run", SETTINGS).start()
    given, killed, until = 0, False, time.monotonic() + START_S
    try:
        job.until((tmp_path / "run" / "resolved.json").exists, "its settings")
        while job.poll() is None and time.monotonic() < until:
            given += give(job, tmp_path / "rows.jsonl")
            if given and not killed:
                killed = True
                job.kill_all()
                job.start()
            time.sleep(0.2)
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    records = steps_of(tmp_path / "run")
    assert given == STEPS * 64 and len(records) == STEPS
    assert all(record["rollout/kept_groups"] == 8 and record["ends/reward_late"] == 0 for record in records)
    assert records[0]["critic/score/max"] <= 1 and "reward/error_rate" in records[0]
