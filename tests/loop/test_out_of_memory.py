"""A job whose loss runs out of memory on one rank when a micro-batch is large, and goes on with smaller ones.

The algorithm is a user's file; the allocation that fails is a real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megarl.config import load_resolved
from tests.loop.test_bad_updates import overrides, records, write_rows
from tests.system.jobs import START_S, Job

BUDGET, ROOM = 256, 50
"""Tokens of a micro-batch as set, and tokens of its answers for which the loss has memory."""
ALGORITHM = f"""
import dataclasses, os
import torch
from megarl.learn.algorithms.supervised import SFT

def loss(batch, config):
    found = SFT.loss(batch, config)
    if os.environ.get("RANK") == "1" and batch.logp.requires_grad and batch.logp.numel() > {ROOM}:
        torch.empty(1 << 50)
    return found

ALGORITHM = dataclasses.replace(SFT, name="hungry", loss=loss)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Without restarts of its own."""
    folder = tmp_path_factory.mktemp("memory")
    write_rows(folder)
    (folder / "spoiled.py").write_text(ALGORITHM)
    more = ("trainer.steps=2", "trainer.tasks_per_step=64", f"trainer.max_tokens_per_micro_batch={BUDGET}")
    job = Job(folder / "run", overrides(folder, folder / "run", *more, "cluster.restarts=0")).start()
    try:
        job.wait(START_S)
        yield job
    finally:
        job.clean_up()


def test_the_job_goes_on_with_half_the_budget_beside_its_restarts(job: Job) -> None:
    said = job.output.read_text()
    assert job.poll() == 0, said
    assert (job.run_dir / "attempt").read_text() == "2"
    assert f"trainer.max_tokens_per_micro_batch {BUDGET} -> {BUDGET // 2}" in said
    assert "equal up to the order of summation" in said and "cluster.restarts: 0 left" in said
    assert load_resolved(job.run_dir / "resolved.json").trainer.max_tokens_per_micro_batch == BUDGET // 2
    job.until_gone(60)


def test_the_error_names_phase_bytes_and_models(job: Job) -> None:
    log = (job.run_dir / "logs" / "attempt_1" / "trainer_1.log").read_text()
    [error] = re.findall(r"trainer: (out of memory in phase update.*)", log)
    assert f"{4 << 50} bytes were asked for" in error and 'spoiled.py", line 9, in loss' in log
    held = dict(re.findall(r"(actor\.\w+) ([\d,]+) bytes", error))
    assert held.keys() == {"actor.parameters", "actor.gradients", "actor.optimizer"}
    assert all(int(size.replace(",", "")) > 0 for size in held.values())


def test_a_start_by_hand_has_the_configured_budget(job: Job) -> None:
    """One more step runs out of memory again, and is halved again: the attempts are 3 and 4."""
    again = Job(job.run_dir, [*job.overrides, "trainer.steps=3"]).start()
    try:
        assert again.wait(START_S) == 0, again.output.read_text()
    finally:
        again.clean_up()
    assert "resumed from" in again.output.read_text()
    assert (job.run_dir / "attempt").read_text() == "4"
    assert f"{BUDGET} -> {BUDGET // 2}" in again.output.read_text()
    assert [r["step"] for r in records(job.run_dir)] == [1, 2, 3]
