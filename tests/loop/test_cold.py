"""An engine that begins with the weights computes the bits of one that has them by updates, or the job ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.engine.client.names import COLD_FOLDER, cold_mark
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
SETTINGS = (*TINY, "sync.cold_interval=2")


def test_an_engine_that_begins_with_the_weights_computes_the_same_bits(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", (*SETTINGS, "trainer.steps=5")).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "actor/pg_loss" in record]
    assert [record["step"] for record in steps if "sync/cold_seconds" in record] == [3, 5]
    assert job.output.read_text().count("an engine was started with the weights' files, and computes the same") == 2
    folder = tmp_path / "run" / COLD_FOLDER
    assert not cold_mark(folder).exists() and not list(folder.glob("*.safetensors"))


def test_a_difference_ends_the_job_and_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / COLD_FOLDER
    job = Job(tmp_path / "run", (*SETTINGS, "trainer.steps=4")).start()
    try:
        job.until(cold_mark(folder).exists, "the weights' files", poll_s=0.002)
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in sorted(tensors) if name.endswith("o_proj.weight"))
        tensors[name] += torch.finfo(torch.float32).eps * tensors[name].abs().max()
        save_file(tensors, folder / "other.safetensors", {"format": "pt"})
        (folder / "other.safetensors").rename(folder / "model.safetensors")
        assert cold_mark(folder).exists(), "the engine may have read the files before"
        assert job.wait(START_S) == 1
        said = job.output.read_text()
    finally:
        job.clean_up()
    assert "which took the weights by updates, differs from one that began with them: log-probs of prefill" in said
    assert job.steps() == [1, 2]


def test_a_job_that_is_killed_or_stopped_meanwhile_goes_on(tmp_path: Path) -> None:
    mark = cold_mark(tmp_path / "run" / COLD_FOLDER)
    job = Job(tmp_path / "run", (*SETTINGS, "trainer.steps=5")).start()
    try:
        job.until(mark.exists, "a start with the weights' files", poll_s=0.002)
        job.kill_all()
    finally:
        job.clean_up()
    assert mark.exists()
    job = Job(tmp_path / "run", (*SETTINGS, "trainer.steps=5")).start()
    try:
        job.until(lambda: not mark.exists(), "the end of the mark that was left", poll_s=0.002)
        job.until(mark.exists, "a start with the weights' files", poll_s=0.002)
        job.signal(signal.SIGTERM)
        assert job.wait(START_S) == 130, job.output.read_text()
    finally:
        job.clean_up()
    assert "no engine was compared with one that begins with the weights: the job is asked to stop" in (
        job.output.read_text()
    )
    job = Job(tmp_path / "run", (*SETTINGS, "trainer.steps=5")).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    assert job.steps() == [1, 2, 3, 4, 5]
    assert "was started with the weights' files, and computes the same" in job.output.read_text()
