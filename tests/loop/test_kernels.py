"""The same job with megarl's kernels and with their plain-torch twins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.jobs import TINY, Job


def start(folder: Path, kernels: str) -> Job:
    """A job with 20 supervised steps and one of preferences, which needs no engine."""
    settings = ["experiment=dpo", *(s for s in TINY[1:] if not s.startswith(("trainer.warm_start.steps", "rollout.")))]
    settings += ["trainer.warm_start.steps=20", "trainer.steps=1", f"trainer.kernels={kernels}"]
    return Job(folder / kernels, settings).start()


def metrics(job: Job) -> list[dict[str, float]]:
    """Of every step, once it has ended."""
    assert job.wait(280) == 0, job.output.read_text()
    return [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)
def test_loss_curves_are_equal(tmp_path: Path) -> None:
    """To 1e-5: training amplifies round-off, and the twin's own curves on one and on two ranks are up to 2e-6 apart.
    tests/parallel/test_head.py has GRPO's, and all grids."""
    jobs = {
        kernels: start(tmp_path, kernels) for kernels in ("megarl", "torch")
    }  # beside each other: most of a start is one process
    try:
        curves = {
            kernels: [m[key] for m in metrics(job) for key in ("sft/loss", "actor/loss") if key in m]
            for kernels, job in jobs.items()
        }
    finally:
        for job in jobs.values():
            job.clean_up()
    assert len(curves["torch"]) == 21
    assert curves["megarl"] == pytest.approx(curves["torch"], rel=1e-5, abs=0)
    assert curves["megarl"] != curves["torch"]  # to the last bit: the setting has reached the trainers
