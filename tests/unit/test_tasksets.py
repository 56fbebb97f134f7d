"""Rows: every fault is named with its file, row and field; generated splits never share a held-out question."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.rewards import compute_score
from megarl.tasks import generate, read_rows, write_rows
from megarl.tasks.generators.generate import SPLITS
from tests.unit.small_rows import write

SIZES = {"train": 300, "eval": 100, "warm_start": 250, "expert": 80}


def row(**changes: Any) -> dict[str, Any]:
    return {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "user", "content": "1 + 1 ="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    } | changes


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_verl_rows_are_read(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"train.{suffix}", [row(), row(ability=None, extra_info=None)])
    first, second = read_rows(path)
    assert first == Task(
        "train/0",
        "reasoning_gym/chain_sum",
        ({"role": "user", "content": "1 + 1 ="},),
        "math",
        {"style": "rule", "ground_truth": "2"},
        {"index": 0},
    )
    assert second.ability == "" and second.extra_info == {} and second.ground_truth == "2"
    assert read_rows(path, split="gsm8k")[1].task_id == "gsm8k/1"


SYSTEM, USER = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}
PROMPTS = [
    ({"prompt": []}, r"prompt must be a non-empty list"),
    ({"prompt": ["1 + 1"]}, r"prompt\[0\] must be a message"),
    ({"prompt": [{"role": "user"}]}, r"prompt\[0\](.content must be a non-empty string, got None| must be a message)"),
    ({"prompt": [{"role": "robot", "content": "a"}]}, r"prompt\[0\].role must be one of system, user, assistant"),
    ({"prompt": [USER, {"role": "user", "content": ""}]}, r"prompt\[1\].content must be a non-empty string"),
    ({"prompt": [USER, SYSTEM]}, r"prompt\[1\].role must be user"),
    ({"extra_info": "x"}, r"extra_info must be a struct"),
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *PROMPTS,
        ({"data_source": ""}, r"data_source must be a non-empty string, got ''"),
        ({"data_source": None}, r"data_source must be a non-empty string, got None"),
        ({"prompt": 3}, r"prompt must be a non-empty list .* got 3 \(int\)"),
        ({"reward_model": None}, r"reward_model must be a struct"),
        (
            {"reward_model": {"style": "rule"}},
            r"reward_model.ground_truth must be the expected answer, got None .*taskset.bad_rows=drop",
        ),
        ({"ability": 3}, r"ability must be a string, got 3 \(int\)"),
    ],
)
def test_a_bad_task_is_named(tmp_path: Path, suffix: str, changes: dict[str, Any], field: str) -> None:
    bad_row(tmp_path / f"d.{suffix}", row(), row() | changes, field, read_rows)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *PROMPTS,
        ({"data_source": ""}, r"data_source must be a non-empty string, got ''"),
        ({"prompt": ""}, r"prompt must be a non-empty list"),
        ({"reward_model": "2"}, r"reward_model must be a struct"),
        ({"response": None}, r"response must be a non-empty string, got None"),
        ({"response": ""}, r"response must be a non-empty string, got ''"),
        ({"response": 3}, r"response must be a non-empty string, got 3"),
    ],
)
def test_a_bad_demonstration_is_named(tmp_path: Path, suffix: str, changes: dict[str, Any], field: str) -> None:
    good = row(response="2")
    bad_row(tmp_path / f"d.{suffix}", good, good | changes, field, partial(read_rows, require_response=True))


def test_values_that_are_not_json_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", [row(extra_info={"x": b"bytes"})])
    with pytest.raises(DataError, match=r"d.parquet: row 1: extra_info must be made of JSON values"):
        read_rows(path)
    path = write(tmp_path / "d.jsonl", [row(), row(reward_model={"ground_truth": math.nan})])
    with pytest.raises(DataError, match=r"d.jsonl: line 2: reward_model.ground_truth must be the expected answer"):
        read_rows(path)


def bad_row(path: Path, good: dict[str, Any], bad: dict[str, Any], field: str, read: Callable[[Path], object]) -> None:
    """The last row of a file is refused by name; the first is right."""
    rows = (
        [good, bad] if path.suffix == ".jsonl" or _same_types(good, bad) else [bad]
    )  # parquet's types exclude some mixtures
    write(path, rows)
    place = f"{'line' if path.suffix == '.jsonl' else 'row'} {len(rows)}"
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: {place}: {field}"):
        read(path)


def _same_types(a: dict[str, Any], b: dict[str, Any]) -> bool:
    try:
        pa.Table.from_pylist([a, b])
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_demonstrations_in_either_form(tmp_path: Path, suffix: str) -> None:
    """A prompt with its response, as verl's; or a chat that ends with the answer. What only rewards need may be left
    out."""
    chat = [SYSTEM, USER, {"role": "assistant", "content": "c", "name": "kept"}]
    wanted = [Task("d/0", "", (SYSTEM, USER), "", {}, {}, "c"), Task("d/1", "", (USER,), "", {}, {}, "c")]
    for rows in (
        [{"prompt": [SYSTEM, USER], "response": "c"}, {"prompt": [USER], "response": "c"}],
        [{"messages": chat, "prompt": "unused"}, {"messages": chat[1:], "prompt": "unused"}],
    ):
        found = read_rows(write(tmp_path / f"d.{suffix}", rows), require_response=True)
        assert [replace(row, answer=None) for row in found] == wanted
        assert [row.answer for row in found] == [chat[-1] if "messages" in rows[0] else None] * 2, (
            "rendered by the template"
        )
    for answer in ("c", [{"role": "assistant", "content": "c"}]):  # TRL's
        rows = [{"prompt": [SYSTEM, USER], "completion": answer}, {"prompt": [USER], "completion": answer}]
        found = read_rows(write(tmp_path / f"d.{suffix}", rows), require_response=True)
        assert [replace(row, answer=None) for row in found] == wanted
        assert [row.answer for row in found] == [None if answer == "c" else {"role": "assistant", "content": "c"}] * 2
    texts = write(tmp_path / f"texts.{suffix}", [{"prompt": "b", "response": "c"}])
    assert read_rows(texts, require_response=True, split="d") == [replace(wanted[1], task_id="d/0")]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages must be a non-empty list"),
        ([USER], r"messages\[0\].role must be assistant"),
        ([{"role": "assistant", "content": "c"}], "messages must be a user's message before"),
        ([SYSTEM, {"role": "assistant", "content": "c"}], r"messages\[0\].role must be a user's message before"),
        ([USER, {"role": "assistant", "content": ""}], r"messages\[1\].content must be a non-empty string"),
    ],
)
def test_a_bad_chat_is_named(tmp_path: Path, messages: list[dict[str, str]], field: str) -> None:
    good = {"messages": [USER, {"role": "assistant", "content": "c"}]}
    bad_row(tmp_path / "d.jsonl", good, {"messages": messages}, field, partial(read_rows, require_response=True))


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for line, words in (
        (b"{", "line 2 is not JSON"),
        (b"[1]", r"line 2 must be a JSON object, got \[1\] \(list\)"),
        (b'{"prompt": "\xff"}', "line 2 is not JSON"),
    ):
        path.write_bytes(json.dumps(row()).encode() + b"\n" + line + b"\n")
        with pytest.raises(DataError, match=rf"{re.escape(str(path))}: {words}"):
            read_rows(path)
    path.write_text("\n" + json.dumps(row()) + "\n\n  \n" + json.dumps(row()) + "\n")
    assert len(read_rows(path)) == 2, "empty lines are no rows"
    path.write_text("\n" + json.dumps(row()) + "\n\n  \n" + json.dumps(row(prompt=[])) + "\n")
    with pytest.raises(DataError, match=r"d.jsonl: line 5: prompt must be"):
        read_rows(path)
    path.write_text("")
    with pytest.raises(DataError, match=r"d.jsonl: has no rows"):
        read_rows(path)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.parquet: no such file"):
        read_rows(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"text.parquet: not a readable parquet file"):
        read_rows(tmp_path / "text.parquet")
    path = write(tmp_path / "short.parquet", [{"data_source": "a", "prompt": "b"}])
    with pytest.raises(
        DataError, match=r"column 'reward_model' is missing; the columns are \['data_source', 'prompt'\]"
    ):
        read_rows(path)
    path = write(tmp_path / "no_response.parquet", [row()])
    with pytest.raises(DataError, match="column 'response' is missing"):
        read_rows(path, require_response=True)
    lines = tmp_path / "lines.parquet"
    lines.write_text(json.dumps(row()))
    with pytest.raises(DataError, match=r"not a readable parquet file.*must be called .json or .jsonl"):
        read_rows(lines)


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    good = Task("t/0", "s", ({"role": "user", "content": "q"},), "math", {"ground_truth": "1"}, {"a": 1})
    write_rows(path, [good])
    with pytest.raises(DataError, match="do not share one schema"):
        write_rows(path, [good, Task("t/1", "s", good.prompt, "math", {"ground_truth": "1"}, {"a": "text"})])
    assert read_rows(path) == [good]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["chain_sum", "basic_arithmetic"])
def test_generated_splits(tmp_path: Path, name: str) -> None:
    paths = {split: tmp_path / f"{split}.parquet" for split in SPLITS}
    written = generate(name, paths, SIZES, seed=3, options={"max_terms": 3})
    questions = {}
    for split in SPLITS:
        tasks = read_rows(paths[split], require_response=split in ("warm_start", "expert"))
        assert tasks == written[split]
        questions[split] = [task.prompt[-1]["content"] for task in tasks]
        assert len(set(questions[split])) == len(tasks) == SIZES[split]
        for task in tasks:
            right, wrong = (
                compute_score(task.data_source, text, task.ground_truth, task.extra_info)
                for text in (task.ground_truth, "x")
            )
            assert (right["status"], wrong["status"]) == ("ok", "wrong")
            assert task.response == (task.ground_truth if split in ("warm_start", "expert") else None)
    assert not set(questions["eval"]) & set(questions["train"] + questions["warm_start"] + questions["expert"])
    assert questions["train"] != questions["warm_start"][: SIZES["train"]]


def test_the_same_arguments_write_the_same_bytes_and_another_seed_other_rows(tmp_path: Path) -> None:
    digests = []
    for i, seed in enumerate([3, 3, 4]):
        paths = {split: tmp_path / f"{split}{i}.parquet" for split in SPLITS}
        generate("chain_sum", paths, SIZES, seed=seed)
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths.values()])
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_small_numbers_leave_both_sides_the_same_distribution(tmp_path: Path) -> None:
    """200 one-digit questions exist; a split by order of drawing would give nearly all of them to one file."""
    sizes = {"train": 600, "eval": 200, "warm_start": 600}
    tasks = generate("chain_sum", {split: tmp_path / f"{split}.parquet" for split in sizes}, sizes, seed=1)
    share = {
        split: sum(len(t.extra_info["metadata"]["expression"]) == 5 for t in rows) for split, rows in tasks.items()
    }
    assert 30 <= share["eval"] <= 70  # a quarter of 200
    assert 120 <= share["train"] <= 160 and 120 <= share["warm_start"] <= 160


def test_max_number_filters(tmp_path: Path) -> None:
    options = {"min_digits": 2, "max_digits": 2, "max_number": 30}
    tasks = generate(
        "chain_sum", {"train": tmp_path / "t.parquet"}, {"train": 100, "eval": 50}, seed=1, options=options
    )
    numbers = [int(n) for t in tasks["train"] for n in re.findall(r"\d+", t.extra_info["metadata"]["expression"])]
    assert max(numbers) <= 30 and max(numbers) > 25 and min(numbers) >= 10


@pytest.mark.usefixtures("soon_dry")
def test_an_unreachable_size_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    paths = {split: tmp_path / f"{split}.parquet" for split in SPLITS}
    with pytest.raises(DataError, match=r"taskset.train_size=300 cannot be reached: .* about 1\d\d distinct questions"):
        generate("chain_sum", paths, SIZES, seed=1, options={"max_digits": 1})
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_have_a_nearest(tmp_path: Path) -> None:
    paths = {"train": tmp_path / "t.parquet"}
    with pytest.raises(ConfigError, match=r"taskset.generate='chain_sums' is not known; did you mean 'chain_sum'\?"):
        generate("chain_sums", paths, SIZES, seed=1)
    with pytest.raises(ConfigError, match=r"taskset.options.max_digit is not an option.*did you mean 'max_digits'\?"):
        generate("chain_sum", paths, SIZES, seed=1, options={"max_digit": 1})
    with pytest.raises(ConfigError, match="a maximum is below its minimum"):
        generate("chain_sum", paths, SIZES, seed=1, options={"min_terms": 3})
