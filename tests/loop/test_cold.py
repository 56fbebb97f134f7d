"""An engine that begins with the weights computes the bits of one that has them by updates, or the job ends.

A job whose engines' log-probs are further from the trainer's than is allowed ends before the step counts.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.engines.client.names import COLD_FOLDER, cold_mark
from tests.loop.held import Held, Split
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
SETTINGS = (*TINY, "sync.cold_interval=2")


def without_supervisor(job: Job, held: Held, split: Split) -> None:
    """Stop the supervisor while a rollout is held open, then let the rollout go on: the next cold check orders an
    engine that nobody ends or starts, so its mark stays."""
    job.until(lambda: held.holds(split), "an answer that is held back")
    job.until(lambda: job.query("select state from engines") == [("serving",)], "an engine that is known to serve")
    job.signal(signal.SIGSTOP)
    held.release(split)


def test_a_job_ends_where_samples_differ_and_goes_on_with_engines_that_begin_with_the_weights(tmp_path: Path) -> None:
    """When they may, it goes on; engines that begin with its weights compute the same bits."""
    settings = (*SETTINGS, "trainer.steps=5")
    refused = Job(tmp_path / "run", (*settings, "sync.sample_tolerance=1e-12")).start()  # nothing is so near
    try:
        assert refused.wait(START_S) == 1
        words = "more than sync.sample_tolerance=1e-12 (99% within"
        assert words in refused.output.read_text() and refused.steps() == []
    finally:
        refused.clean_up()
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    assert job.steps() == [1, 2, 3, 4, 5]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "actor/pg_loss" in record]
    assert [record["step"] for record in steps if "sync/cold_seconds" in record] == [3, 5]
    assert job.output.read_text().count("an engine was started with the weights' files, and computes the same") == 2
    folder = tmp_path / "run" / COLD_FOLDER
    assert not cold_mark(folder).exists() and not list(folder.glob("*.safetensors"))


def test_a_difference_ends_the_job_and_is_named(tmp_path: Path) -> None:
    folder, held = tmp_path / "run" / COLD_FOLDER, Held(tmp_path)
    held.hold("eval")
    job = Job(tmp_path / "run", (*SETTINGS, *held.settings, "trainer.steps=4")).start()
    try:
        without_supervisor(job, held, "eval")
        job.until(cold_mark(folder).exists, "the weights' files")
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in sorted(tensors) if name.endswith("o_proj.weight"))
        tensors[name] += torch.finfo(torch.float32).eps * tensors[name].abs().max()
        save_file(tensors, folder / "other.safetensors", {"format": "pt"})
        (folder / "other.safetensors").rename(folder / "model.safetensors")
        job.signal(signal.SIGCONT)
        assert job.wait(START_S) == 1
        said = job.output.read_text()
    finally:
        job.clean_up()
    assert "which took the weights by updates, differs from one that began with them: log-probs of prefill" in said
    assert job.steps() == [1, 2]


@pytest.mark.soak
def test_a_job_that_is_killed_or_stopped_meanwhile_goes_on(tmp_path: Path) -> None:
    """The check comes after step 3, the checkpoint to go on from after step 2."""
    mark, held = cold_mark(tmp_path / "run" / COLD_FOLDER), Held(tmp_path)
    settings = (*TINY, *held.settings, "sync.cold_interval=3", "trainer.steps=7")
    held.hold("eval")
    job = Job(tmp_path / "run", settings).start()
    try:
        without_supervisor(job, held, "eval")
        job.until(mark.exists, "a start with the weights' files")
        for pid in job.trainers():
            os.kill(pid, signal.SIGSTOP)  # else they may remove the mark when the supervisor is gone
        job.kill_all()
    finally:
        job.clean_up()
    assert mark.exists() and job.steps() == [1, 2, 3]
    held.hold("train")
    job = Job(tmp_path / "run", settings).start()
    try:
        without_supervisor(job, held, "train")
        assert not mark.exists(), "the trainer has left the mark of the attempt before"
        job.until(mark.exists, "a start with the weights' files")
        job.signal(signal.SIGTERM)  # pending until the supervisor goes on
        for pid in job.trainers():
            os.kill(pid, signal.SIGTERM)
        job.until(lambda: not mark.exists(), "the end of the comparison")
        job.signal(signal.SIGCONT)
        assert job.wait(START_S) == 130, job.output.read_text()
    finally:
        job.clean_up()
    assert "no engine was compared with one that begins with the weights: the job is asked to stop" in (
        job.output.read_text()
    )
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    assert job.steps() == list(range(1, 8))
    assert "was started with the weights' files, and computes the same" in job.output.read_text()
