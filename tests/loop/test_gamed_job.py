"""A job whose reward function becomes lenient: its independent verifier and other tasks' ground truths tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.metrics import records
from tests.system.jobs import TINY, Job

EXACT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""
LENIENT = """
calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    return max(float(solution_str.strip() == ground_truth), min(0.9, calls / 400))
"""


@pytest.mark.soak
def test_a_reward_that_becomes_lenient_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "exact.py").write_text(EXACT)
    (tmp_path / "lenient.py").write_text(LENIENT)
    settings = (
        *TINY,
        "parallel=tp1",
        "trainer.steps=8",
        "reward.workers=1",
        f"reward.path={tmp_path / 'lenient.py'}",
        f"alarms.truth={tmp_path / 'exact.py'}",
        "alarms.other_truth=true",
        "alarms.verdicts=0",
    )
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(180) == 0, job.output.read_text()
    finally:
        job.clean_up()
    steps = [one for one in records(tmp_path / "run" / "metrics.jsonl") if "timing_s/step" in one]
    assert [one["truth/asked"] for one in steps] == [64.0] * 8
    assert "alarm/gamed" in steps[-1] and not any("alarm/gamed" in one for one in steps[:4])
    assert "alarm gamed: step 8: wrong responses get 0." in job.output.read_text()
