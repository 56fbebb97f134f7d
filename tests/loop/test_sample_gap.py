"""A job whose engines' log-probs are further from the trainer's than is allowed ends before the step counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)


def test_a_job_ends_where_samples_differ_and_goes_on_when_they_may(tmp_path: Path) -> None:
    run_dir, one = tmp_path / "run", (*TINY, "trainer.steps=1")
    job = Job(run_dir, (*one, "sync.sample_tolerance=1e-12")).start()  # no two implementations are so near
    try:
        assert job.wait(START_S) == 1
        words = "more than sync.sample_tolerance=1e-12 (99% within"
        assert words in job.output.read_text() and job.steps() == []
    finally:
        job.clean_up()
    again = Job(run_dir, one).start()
    try:
        assert again.wait(START_S) == 0 and again.steps() == [1]
    finally:
        again.clean_up()
