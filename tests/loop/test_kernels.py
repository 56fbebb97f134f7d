"""The same job with megarl's kernels and with their plain-torch twins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.jobs import TINY, Job


def run(folder: Path, kernels: str) -> list[dict[str, float]]:
    """Metrics of every step of a job with 20 supervised steps and one of reinforcement learning."""
    tiny = [override for override in TINY if not override.startswith("trainer.warm_start.steps")]
    job = Job(folder / kernels, [*tiny, "trainer.warm_start.steps=20", "trainer.steps=1", f"trainer.kernels={kernels}"]).start()
    try:
        assert job.wait(280) == 0, job.output.read_text()
        return [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    finally:
        job.clean_up()


@pytest.mark.timeout(600)
def test_loss_curves_are_equal(tmp_path: Path) -> None:
    """Of the supervised steps, to 1e-6; what the engine then samples may differ. tests/parallel/test_head.py has GRPO's, and all grids."""
    curves = {kernels: [m["sft/loss"] for m in run(tmp_path, kernels) if "sft/loss" in m] for kernels in ("megarl", "torch")}
    assert len(curves["torch"]) == 20
    assert curves["megarl"] == pytest.approx(curves["torch"], rel=1e-6, abs=0)
    assert curves["megarl"] != curves["torch"]  # to the last bit: the setting has reached the trainers
