"""The table of a sweep's results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.run.launch.sweep import runs_of, table_of


def run_of(folder: Path, name: str, *records: dict[str, float]) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "resolved.json").write_text("{}")
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "val')
    return path


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    before, after = {"step": 0, "val/accuracy": 0.162}, {"step": 2, "val/accuracy": 0.942}
    run_of(tmp_path, "algorithm=grpo", before, {"step": 1, "actor/loss": 1.0}, {"step": 2, "actor/loss": 0.5}, after)
    run_of(tmp_path, "algorithm=sft", {"step": 1, "train/loss": 2.0}, {"step": 1, "val/loss": 1.5})
    run_of(tmp_path, "algorithm=zero")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_a_line_for_each_run(swept: Path) -> None:
    head, *lines = (line.split() for line in table_of(runs_of(swept)).splitlines())
    assert head == ["run", "steps", "held", "out", "first", "last"]
    assert lines == [
        ["algorithm=grpo", "2", "accuracy", "16.2%", "94.2%"],
        ["algorithm=sft", "1", "loss", "1.5000", "1.5000"],
        ["algorithm=zero", "0", "—", "—", "—"],
    ]


def test_report_of_a_sweeps_directory(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(swept)]) == 0
    assert "algorithm=grpo" in capsys.readouterr().out


def test_report_of_any_other_directory(tmp_path: Path) -> None:
    assert main(["report", str(tmp_path)]) == 2
