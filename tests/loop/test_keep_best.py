"""``trainer.keep_best``: the checkpoint with the best evaluation stays when newer ones come, and a bench finds it."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.cli import main
from megarl.run.launch.subjects import subject_of
from megarl.weights.checkpoint.training.state import finished
from tests.system.jobs import START_S, Job

SETTINGS = (
    "trainer.steps=5",
    "trainer.eval_interval=1",
    "trainer.checkpoint_interval=1",
    "trainer.keep_checkpoints=1",
    "trainer.keep_best=val/loss",
    "trainer.optimizer.lr=0.5",  # so large that the loss grows again
)


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    assert main(["init", str(folder), "--kind", "sft"]) == 0
    job = Job(run_dir, ("--config-dir", str(folder), "experiment=mine", *SETTINGS))
    try:
        assert job.start().wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = {record["step"]: record["val/loss"] for record in records if "val/loss" in record}
    best = min(losses, key=lambda step: losses[step])
    assert best < 5
    assert [path.name for path in finished(run_dir / "checkpoints")] == [f"global_step_{best}", "global_step_5"]
    assert subject_of(f"run:{run_dir}@best").path.name == f"global_step_{best}"
    assert f"global_step_{best} (by val/loss)" in job.output.read_text()
