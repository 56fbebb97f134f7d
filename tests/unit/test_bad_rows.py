"""Bad rows are left out by one setting, of tasks, demonstrations and preferences alike, and counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.core.errors import DataError
from megarl.run.checks import job as checks
from megarl.run.launch.job import halved
from megarl.run.run_dir import rows as run_rows
from megarl.run.run_dir.rows import read_split
from megarl.tasks import recorded
from megarl.tasks.row_files import FILE
from megarl.train.loop import offline as training
from tests.unit.small_job import config_of, refused

LONG = "1 2 3 4 " * 40
DROP = "taskset.bad_rows=drop"
MOODY = {"role": "user", "content": "1 + 1 =", "mood": "a field that no template reads"}
BAD: dict[str, list[dict[str, Any]]] = {
    "sft": [{"response": None}, {"prompt": []}, {"response": LONG}, {"prompt": [MOODY]}],
    "dpo": [{"rejected": None}, {"prompt": [MOODY]}, {"prompt": 3}, {"chosen": LONG}, {"chosen": "é", "rejected": "è"}],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories with rows and a model; no test changes them."""
    folders = {name: tmp_path_factory.mktemp(name) for name in BAD}
    for name, folder in folders.items():
        checks.check(config_of(folder, f"algorithm.name={name}"))
    return folders


def overrides_of(made: Path, name: str, path: Path) -> list[str]:
    """Settings of a job whose train rows 2, 4, … are ``BAD``."""
    rows = pq.read_table(made / "data" / "train.parquet", partitioning=None).to_pylist()
    for i, changes in enumerate(BAD[name]):
        rows[2 * i + 2] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"taskset.{split}={made}/data/{split}.parquet" for split in ("eval", "warm_start")]
    model = [f"model.path={made}/model"] if (made / "model").is_dir() else []
    return [f"algorithm.name={name}", f"taskset.train={path}", *files, *model]


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_left_out_and_counted_offline(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run, path = tmp_path / "run", tmp_path / "rows.jsonl"
    overrides = overrides_of(made[name], name, path)
    refused(DataError, config_of(run, *overrides), f"{path}: line 3", DROP)
    assert not (run / FILE).exists()
    config = config_of(run, *overrides, DROP)
    bad = {f"train/{2 * i + 2}" for i in range(len(BAD[name]))}
    with caplog.at_level(logging.INFO):
        checks.check(config, dry=True)
    assert f"{len(bad)} of 30 rows of taskset.train are left out; the first is {path}: line 3" in caplog.text
    assert f"{30 - len(bad)} train, 10 eval" in caplog.text and f"{len(bad)} bad of train left out" in caplog.text
    assert not (run / FILE).exists(), "a dry check writes nothing"
    checks.check(config)
    left_out = recorded(config.taskset, run)
    assert left_out["train"] == bad and not left_out["eval"] and not left_out["warm_start"]
    assert recorded(config_of(run, *overrides).taskset, run) == {}, "refuse leaves out none"
    tokenizer = checks.ChatTokenizer.of(config)
    found = training.read(
        str(path), tokenizer, pairs=name == "dpo", split="train", skipped=left_out["train"]
    )  # as the trainer reads them
    assert len(found) == 30 - len(bad)


def test_a_resume_leaves_out_the_same_rows(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rows fit depends on settings that may change between two starts; which rows are trained on must not."""
    run, path = tmp_path / "run", tmp_path / "rows.jsonl"
    overrides = [*overrides_of(made["dpo"], "dpo", path), DROP]
    checks.check(config_of(run, *overrides))
    first = (run / FILE).read_text()
    monkeypatch.setattr(run_rows, "has_checkpoints", lambda run_dir: True)
    monkeypatch.setattr(checks, "has_checkpoints", lambda run_dir: True)
    checks.check(config_of(run, *overrides, "trainer.max_tokens_per_micro_batch=2048"))
    assert (run / FILE).read_text() == first
    assert len(read_split(config_of(run, *overrides), "train")) == 30 - len(BAD["dpo"])
    rows = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(rows[0]) | {"chosen": ""}), *rows[1:]]) + "\n")
    refused(DataError, config_of(run, *overrides), f"{path}: line 1: chosen must be", "sound at the run's start")


def test_half_a_micro_batch_is_compared_with_the_rows_that_are_left(made: dict[str, Path], tmp_path: Path) -> None:
    overrides = [*overrides_of(made["dpo"], "dpo", tmp_path / "rows.jsonl"), DROP]
    config = config_of(tmp_path / "run", *overrides, "trainer.max_tokens_per_micro_batch=256")
    checks.check(config)
    assert halved(config)[1].new == 128


def test_a_file_without_a_sound_row_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name, changes in (("sft", {"response": ""}), ("sft", {"response": LONG}), ("dpo", {"rejected": ""})):
        path = tmp_path / "rows.jsonl"
        overrides = [*overrides_of(made[name], name, path), DROP]
        rows = [json.loads(line) | changes for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        refused(DataError, config_of(run, *overrides), str(path), "taskset.bad_rows=drop leaves no", "line ")


def test_malformed_tasks_are_left_out_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, path = tmp_path / "run", tmp_path / "rows.jsonl"
    checks.check(config_of(run))
    rows = pq.read_table(run / "data" / "train.parquet", partitioning=None).to_pylist()
    rows[2]["prompt"], rows[4]["reward_model"], rows[6]["extra_info"] = [], None, "text"
    for i, row in enumerate(rows):
        row["extra_info"] = row["extra_info"] if i == 6 else {**(row["extra_info"] or {}), "level": f"Level {i % 5}"}
    rows[8] |= {"data_source": "k12/x", "extra_info": {"type": "essay", "level": "hard"}}
    rows[10]["extra_info"]["level"] = "Level ?"
    rows[12]["prompt"] = [MOODY]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(DataError, config_of(run, f"taskset.train={path}"), "line 3: prompt must be", DROP)
    settings = [f"taskset.train={path}", "taskset.difficulty=level", "taskset.max_difficulty=4"]
    with caplog.at_level(logging.INFO):
        found = checks.check(config_of(run, *settings, DROP))["train"]
    assert found.dropped == {"bad_row": 6} and len(found.tasks) == 24
    assert "6 of 30 rows of taskset.train are left out; the first is" in caplog.text and "line 3" in caplog.text
    assert sorted(json.loads((run / FILE).read_text())["train"]) == sorted(f"train/{i}" for i in (2, 4, 6, 8, 10, 12))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[9:]))
    refused(DataError, config_of(run, *settings), "line 2", "extra_info.level must be a number", "Level ?", DROP)
