"""Columns of rows: what is said about those that are missing, and names of others, for every kind of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import compose
from megarl.core.errors import ConfigError, DataError
from megarl.learn import algorithms
from megarl.run.checks.tasksets import check_taskset
from megarl.run.run_dir.rows import read_split
from megarl.tasks import read_preferences, read_rows


def write(path: Path, row: dict[str, Any]) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


def test_a_missing_data_source_names_what_replaces_it(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "1+1?", "reward_model": {"ground_truth": "2"}})
    with pytest.raises(DataError) as raised:
        read_rows(path)
    for setting in ("taskset.columns={data_source: COLUMN}", "taskset.data_source=math", "reward.path"):
        assert setting in str(raised.value)


def test_a_missing_answer_names_its_column(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "1+1?", "answer": "2", "data_source": "math"})
    with pytest.raises(DataError, match=r"taskset.columns=\{ground_truth: COLUMN\}"):
        read_rows(path)


@pytest.mark.parametrize(("settings", "source"), [([], "user"), (["taskset.data_source=math"], "math")])
def test_a_reward_of_ones_own_needs_no_data_source(tmp_path: Path, settings: list[str], source: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "1+1?", "reward_model": {"ground_truth": "2"}})
    files = [f"taskset.train={path}", f"taskset.eval={path}", "model.path=/m"]
    [row] = read_split(compose(["experiment=own", *files, "reward.path=mine.py", *settings]), "train")
    assert row.data_source == source
    with pytest.raises(DataError, match="column 'data_source' is missing"):
        read_split(compose(["experiment=own", *files]), "train")


def test_columns_of_demonstrations(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"instruction": "1+1?", "output": "2", "level": 3})
    columns = {"prompt": "instruction", "response": "output", "extra_info.level": "level"}
    [row] = read_rows(path, require_response=True, columns=columns)
    assert (row.prompt[0]["content"], row.response, row.extra_info) == ("1+1?", "2", {"level": 3})
    with pytest.raises(DataError, match=r"taskset.columns=\{prompt: COLUMN\}"):
        read_rows(path, require_response=True)


def test_columns_of_preferences(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"question": "1+1?", "good": "2", "bad": "3"})
    [row] = read_preferences(path, columns={"prompt": "question", "chosen": "good", "rejected": "bad"})
    assert (row.prompt[0]["content"], row.chosen, row.rejected) == ("1+1?", "2", "3")
    with pytest.raises(DataError, match=r"taskset.columns=\{chosen: COLUMN\}"):
        read_preferences(path)


@pytest.mark.parametrize(
    ("algorithm", "columns", "words"),
    [
        ("sft", "{response: output}", None),
        ("dpo", "{chosen: good}", None),
        ("sft", "{chosen: good}", "'chosen', which is not a field of demonstrations"),
        ("dpo", "{ground_truth: good}", "'ground_truth', which is not a field of preferences"),
    ],
)
def test_fields_of_offline_jobs(algorithm: str, columns: str, words: str | None) -> None:
    config = compose([f"experiment={algorithm}", f"taskset.columns={columns}"])
    job = algorithms.job_of(config)
    if words is None:
        check_taskset(config, job)
    else:
        with pytest.raises(ConfigError, match=words):
            check_taskset(config, job)
