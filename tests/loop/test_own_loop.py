"""A training loop of a user's own (``trainer.loop``), with the services of megarl's."""

from __future__ import annotations

from pathlib import Path

from tests import same
from tests.loop.conftest import WHOLE
from tests.system.jobs import START_S, Job

LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_example_gives_the_weights_and_the_answers_of_megarls_loop(tmp_path: Path, whole_job: Job) -> None:
    job = Job(tmp_path / "run", (*WHOLE, f"trainer.loop={LOOP}")).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    for facts in (same.files_of_weights, same.store, same.trajectories):
        assert (found := facts(whole_job.run_dir)) and facts(job.run_dir) == found
    assert job.steps() == [1, 2, 3]


def test_the_example_is_short() -> None:
    assert len(LOOP.read_text().splitlines()) <= 60
