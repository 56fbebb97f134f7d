"""Each folder of ``megarl init`` trains a step as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.run.launch.starter import KINDS
from tests.system.jobs import START_S, Job

SHORT = ("trainer.steps=1",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_trains(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / f"my_{kind}"
    assert main(["init", str(folder), "--kind", kind]) == 0
    job = Job(folder / "run", ("--config-dir", str(folder), f"experiment=my_{kind}", *SHORT))
    try:
        assert job.start().wait(2 * START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    assert "Traceback" not in job.output.read_text()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 1
