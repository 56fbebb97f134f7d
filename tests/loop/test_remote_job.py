"""``trainer.remote``: a run whose folder is gone goes on from its copy, with the bits of one that kept its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from tests.system.jobs import START_S, Job

TIMES = ("time", "timing", "perf", "seconds", "idle", "overlap", "memory", "attempt")


def train(folder: Path, steps: int, *more: str) -> None:
    words = ("--config-dir", str(folder), "experiment=mine", "trainer.checkpoint_interval=1", f"trainer.steps={steps}")
    job = Job(folder / "run", (*words, *more))
    try:
        assert job.start().wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Metrics of each step, times aside."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {
        record["step"]: {name: value for name, value in record.items() if not any(word in name for word in TIMES)}
        for record in records
        if record.get("training/global_step") == record["step"]
    }


@pytest.mark.soak  # tests/unit/test_remote_checkpoints.py has the copies without a job
def test_a_run_goes_on_elsewhere(tmp_path: Path) -> None:
    folder, remote = tmp_path / "mine", tmp_path / "remote"
    assert main(["init", str(folder), "--kind", "sft"]) == 0
    train(folder, 2, f"trainer.remote=file://{remote}")
    assert (remote / "global_step_2" / "state.json").is_file()
    shutil.move(folder / "run", tmp_path / "kept")
    train(folder, 4, f"trainer.remote=file://{remote}")
    copies = {path.name for path in remote.iterdir()}
    assert "global_step_4" in copies <= {"global_step_3", "global_step_4"}  # a slow copy skips a checkpoint
    elsewhere = steps_of(folder / "run")
    shutil.rmtree(folder / "run")
    shutil.move(tmp_path / "kept", folder / "run")
    train(folder, 4)
    here = steps_of(folder / "run")
    assert set(elsewhere) == set(here) == {1, 2, 3, 4}
    assert {name for step in here for name in here[step] if here[step][name] != elsewhere[step].get(name)} == set()
