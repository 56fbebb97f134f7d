"""Rows and rewards that cannot work are refused with file, row and field, before any process is launched."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.run.checks import job as checks
from megarl.tasks import read_rows, write_rows
from tests.unit.small_job import config_of, refused


def test_missing_file_without_a_generator(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, f"taskset.eval={tmp_path}/eval.parquet", "taskset.generate=null")
    refused(ConfigError, config, f"taskset.eval={tmp_path}/eval.parquet", "no such file")


def test_unknown_generator(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, f"taskset.eval={tmp_path}/eval.parquet", "taskset.generate=chain_summ")
    refused(ConfigError, config, "chain_summ", "chain_sum")


def test_a_template_that_refuses_tools_is_no_fault_of_a_row(prepared: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(prepared, tmp_path / "run"))
    file = run / "model" / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values["chat_template"] = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + values["chat_template"]
    file.write_text(json.dumps(values))
    tools = ["rollout.workflow=tools", "rollout.tools=[calculator]", "rollout.max_trajectory_tokens=99"]
    tools += ["taskset.bad_rows=drop"]
    refused(ConfigError, config_of(run, *tools), "rollout.tools=['calculator']", "set rollout.tool_format to one of")


def rewritten(prepared: Path, split: str, path: Path, row: int, **changes: Any) -> str:
    """An override for a copy of a split's file in which some columns of one row differ; without a value the column
    goes."""
    table = pq.read_table(prepared / "data" / f"{split}.parquet", partitioning=None)
    rows = table.to_pylist()
    for name, value in changes.items():
        if value is Ellipsis:
            rows = [{k: v for k, v in r.items() if k != name} for r in rows]
        else:
            rows[row][name] = value
    pq.write_table(type(table).from_pylist(rows), path)
    return f"taskset.{split}={path}"


@pytest.mark.parametrize(
    ("split", "changes", "words"),
    [
        ("train", {"prompt": ...}, ["column 'prompt' is missing"]),
        ("eval", {"reward_model": ...}, ["column 'reward_model' is missing"]),
        ("train", {"prompt": []}, ["row 4", "prompt must be", "non-empty list"]),
        ("train", {"prompt": [{"role": "user", "content": ""}]}, ["row 4", "prompt[0].content"]),
        ("eval", {"prompt": [{"role": "robot", "content": "1 + 1"}]}, ["row 4", "prompt[0].role", "'robot'"]),
        ("train", {"data_source": ""}, ["row 4", "data_source must be"]),
        ("train", {"reward_model": {"style": "rule", "ground_truth": None}}, ["row 4", "reward_model.ground_truth"]),
        ("warm_start", {"response": None}, ["row 4", "response must be"]),
        ("warm_start", {"response": ...}, ["column 'response' is missing"]),
    ],
)
def test_malformed_row(prepared: Path, tmp_path: Path, split: str, changes: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "rows.parquet"
    refused(DataError, config_of(prepared, rewritten(prepared, split, path, 3, **changes)), str(path), *words)


def test_file_that_is_not_parquet(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("question,answer\n1+1,2\n")
    config = config_of(prepared, f"taskset.train={tmp_path}/rows.parquet")
    refused(DataError, config, f"{tmp_path}/rows.parquet", "not a readable parquet file")


def test_files_of_the_same_name_are_different_tasks(prepared: Path, tmp_path: Path) -> None:
    paths = [tmp_path / split / "rows.parquet" for split in ("train", "eval")]
    for path in paths:
        path.parent.mkdir()
    overrides = [rewritten(prepared, path.parent.name, path, 0) for path in paths]
    tasks = checks.check(config_of(prepared, *overrides))
    assert [found.tasks[7].task_id for found in tasks.values()] == ["train/7", "eval/7"]


@pytest.mark.parametrize("source", ["my/own", "reasoning_gym/chain_summ"])
def test_data_source_without_a_verifier(prepared: Path, tmp_path: Path, source: str) -> None:
    override = rewritten(prepared, "train", tmp_path / "rows.parquet", 3, data_source=source)
    refused(DataError, config_of(prepared, override), "row 4", "taskset.train", repr(source), "reward.path")


def test_own_reward_function_takes_any_data_source(prepared: Path, tmp_path: Path) -> None:
    override = rewritten(prepared, "train", tmp_path / "rows.parquet", 3, data_source="my/own")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    checks.check(config_of(prepared, override, f"reward.path={tmp_path}/reward.py"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def compute_score(data_source)\n    return 1.0\n", ["SyntaxError", "reward.py, line 1"]),
        ("\nimport no_such_module\n", ["no_such_module", "reward.py:2"]),
        ("def score(*_):\n    return 1.0\n", ["defines no function", "compute_score(data_source"]),
        ("\ndef compute_score(answer, truth):\n    return 1.0\n", ["TypeError", "data_source", "reward.py:2"]),
        ("def compute_score(solution_str, **_):\n    return solution_str + 1\n", ["TypeError", "reward.py:2", "row 1"]),
        ("def compute_score(**_):\n    return 'good'\n", ["must return a number", "'good'", "reward.py:1"]),
        ("def compute_score(**_):\n    while True: pass\n", ["no verdict within 1 s", "reward.timeout_s"]),
        ("import os\nos._exit(3)\n", ["ended with code 3", "reward.py"]),
    ],
    ids=["syntax", "import", "name", "signature", "raises", "result", "hangs", "exits"],
)
def test_own_reward_function_that_cannot_work(prepared: Path, tmp_path: Path, source: str, words: list[str]) -> None:
    (tmp_path / "reward.py").write_text(source)
    refused(ConfigError, config_of(prepared, f"reward.path={tmp_path}/reward.py", "reward.timeout_s=1"), *words)


def test_prompt_that_the_template_refuses_names_file_and_row(prepared: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    override = rewritten(prepared, "train", tmp_path / "rows.parquet", 3, prompt=messages)
    refused(DataError, config_of(prepared, override), f"{tmp_path}/rows.parquet: row 4", "role system")


@pytest.mark.parametrize("split", ["train", "warm_start"])
def test_held_out_question_among_the_others(prepared: Path, tmp_path: Path, split: str) -> None:
    rows, held_out = (read_rows(prepared / "data" / f"{name}.parquet") for name in (split, "eval"))
    question = held_out[2].prompt[-1]
    same = {**question, "content": f" {question['content'].upper()}  "}  # to a reader it is the same one
    leaked: list[Task] = [*rows[:5], replace(rows[5], prompt=(*held_out[2].prompt[:-1], same)), *rows[6:]]
    write_rows(tmp_path / "rows.parquet", leaked)
    config = config_of(prepared, f"taskset.{split}={tmp_path}/rows.parquet")
    refused(DataError, config, f"rows.parquet: row 6 (taskset.{split}) asks", "taskset.eval", same["content"])


def test_held_out_questions_are_named_together(prepared: Path, tmp_path: Path) -> None:
    rows, held_out = (read_rows(prepared / "data" / f"{name}.parquet") for name in ("train", "eval"))
    leaked = [replace(row, prompt=held_out[i].prompt) for i, row in enumerate(rows[:8])]
    write_rows(tmp_path / "rows.parquet", [*leaked, *rows[8:]])
    config = config_of(prepared, f"taskset.train={tmp_path}/rows.parquet")
    refused(
        DataError, config, "row 1 (taskset.train) asks", "as do 7 others: ", "row 6 (taskset.train), …; drop them there"
    )


@pytest.mark.parametrize("split", ["train", "eval"])
def test_prompt_longer_than_the_limit(prepared: Path, tmp_path: Path, split: str) -> None:
    long = [{"role": "user", "content": "1 + 2 + 3 + 4 " * 30}]
    override = rewritten(prepared, split, tmp_path / "rows.parquet", 3, prompt=long)
    refused(
        DataError,
        config_of(prepared, override),
        f"{tmp_path}/rows.parquet: row 4",
        "tokens",
        "rollout.max_prompt_tokens is 48",
    )


def test_demonstration_longer_than_the_context(prepared: Path, tmp_path: Path) -> None:
    override = rewritten(prepared, "warm_start", tmp_path / "rows.parquet", 3, response="1 2 3 4 " * 40)
    refused(DataError, config_of(prepared, override), "row 4 (taskset.warm_start)", "context is 128")
