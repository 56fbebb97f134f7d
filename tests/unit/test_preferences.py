"""Preference rows in every form that TRL has them, each fault named; and the pairs that the generators write."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Preference, Task
from megarl.rewards import compute_score
from megarl.tasks import generate, read_preferences, read_recipe, read_rows, write_preferences
from megarl.tasks.generators.generate import SPLITS
from tests.unit.small_rows import write

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
SIZES = {"train": 300, "eval": 100, "warm_start": 250, "expert": 80}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS: list[dict[str, Any]] = [
    {"prompt": [USER], "chosen": "a", "rejected": "b"},
    {"prompt": "u", "chosen": "a", "rejected": "b"},
    {"prompt": [USER], "chosen": [says("a")], "rejected": [says("b")]},
    {"prompt": "u", "chosen": [USER, says("a")], "rejected": [USER, says("b")]},
    {"prompt": [USER], "chosen": [USER, says("a")], "rejected": [USER, says("b")]},
    {"chosen": [USER, says("a")], "rejected": [USER, says("b")]},
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_every_form_is_the_same_preference(tmp_path: Path, suffix: str, form: int) -> None:
    none = {"margin": None, "data_source": None, "extra_info": None}
    path = write(
        tmp_path / f"p.{suffix}",
        [FORMS[form] | none, FORMS[form] | {"margin": 0.5, "data_source": "d", "extra_info": {"k": 1}}],
    )
    rows = read_preferences(path, split="train")
    rendered = (
        (says("a"), says("b")) if isinstance(FORMS[form]["chosen"], list) else (None, None)
    )  # texts stand as they are
    assert all(row.answers == rendered for row in rows)
    first, second = (replace(row, answers=(None, None)) for row in rows)
    assert first == Preference("train/0", "", (USER,), "a", "b")
    assert second == Preference("train/1", "d", (USER,), "a", "b", 0.5, {"k": 1})


def test_a_long_chat_is_the_prompt(tmp_path: Path) -> None:
    before = [SYSTEM, USER, says("x"), USER]
    path = write(tmp_path / "p.jsonl", [{"chosen": [*before, says("a")], "rejected": [*before, says("b")]}])
    assert read_preferences(path) == [Preference("p/0", "", tuple(before), "a", "b", answers=(says("a"), says("b")))]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"chosen": ""}, "chosen must be a non-empty string"),
        ({"rejected": None}, "rejected must be a non-empty string"),
        ({"rejected": 3}, "rejected must be a non-empty string"),
        ({"rejected": []}, "rejected must be a non-empty list"),
        ({"rejected": [says("")]}, r"rejected\[0\].content must be a non-empty string"),
        ({"chosen": [USER]}, r"chosen\[0\].role must be assistant"),
        ({"rejected": "a"}, "rejected must be another answer than chosen, got 'a'"),
        ({"chosen": [says("b")]}, "rejected must be another answer than chosen"),
        ({"prompt": None}, "prompt must be a text or messages, where chosen"),
        ({"prompt": []}, "prompt must be a non-empty list"),
        ({"prompt": [says("u")]}, r"prompt\[0\].role must be user"),
        ({"chosen": [USER, says("a")]}, "rejected must be an answer to the same messages as chosen"),
        (
            {"chosen": [SYSTEM, USER, says("a")], "rejected": [SYSTEM, USER, says("b")]},
            "chosen must be an answer to prompt",
        ),
        (
            {"prompt": None, "chosen": [USER, says("x"), says("a")], "rejected": [USER, says("x"), says("b")]},
            r"chosen\[1\].role must be user",
        ),
        ({"margin": "1"}, "margin must be a finite number"),
        ({"margin": True}, "margin must be a finite number"),
        ({"margin": float("inf")}, "margin must be a finite number"),
        ({"data_source": ""}, "data_source must be a non-empty string"),
        ({"extra_info": 1}, "extra_info must be a struct"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    path = write(tmp_path / "p.jsonl", [FORMS[0], FORMS[0] | changes])
    with pytest.raises(DataError, match=rf"p.jsonl: line 2: {field}"):
        read_preferences(path)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", [{"prompt": "u", "chosen": "a"}])
    with pytest.raises(DataError, match="column 'rejected' is missing"):
        read_preferences(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [
        Preference("p/0", "", (SYSTEM, USER), "a", "b", 0.5, {"k": [1, 2]}),
        Preference("p/1", "d", (USER,), "c", "d", 0.0, {"k": [3]}),
    ]
    write_preferences(tmp_path / "p.parquet", rows, {"made": "here"})
    assert read_preferences(tmp_path / "p.parquet") == rows
    assert read_recipe(tmp_path / "p.parquet") == {"made": "here"}


@pytest.mark.parametrize("name", ["chain_sum", "basic_arithmetic"])
def test_generated_pairs(tmp_path: Path, name: str) -> None:
    paths = {split: tmp_path / f"{split}.parquet" for split in SPLITS}
    written = generate(name, paths, SIZES, seed=3, options={"max_terms": 3}, kind="preferences")
    asked: dict[str, list[str]] = {}
    for split in ("train", "eval"):
        pairs = read_preferences(paths[split])
        assert pairs == written[split]
        asked[split] = [pair.prompt[-1]["content"] for pair in pairs]
        assert len(set(asked[split])) == len(pairs) == SIZES[split]
        for pair in pairs:
            entry = {"question": pair.prompt[-1]["content"], "metadata": pair.extra_info["metadata"]}
            scores = [
                compute_score(pair.data_source, text, pair.chosen, pair.extra_info | entry)["score"]
                for text in (pair.chosen, pair.rejected)
            ]
            assert scores == [1.0, 0.0]
            assert len(pair.rejected) == len(pair.chosen), "an answer that length gives away teaches nothing"
            assert str(int(pair.rejected)) == pair.rejected or pair.rejected == "-0"
        slips = [
            pair.rejected[:-1] == pair.chosen[:-1] and int(pair.rejected[-1]) == (int(pair.chosen[-1]) + 1) % 10
            for pair in pairs
        ]
        assert 0.4 < sum(slips) / len(slips) < 0.75
    demonstrations = read_rows(paths["warm_start"], require_response=True)
    assert demonstrations == written["warm_start"]
    asked["warm_start"] = [row.prompt[-1]["content"] for row in demonstrations]
    assert not set(asked["eval"]) & set(asked["train"] + asked["warm_start"])


def test_the_kind_of_rows_changes_no_question(tmp_path: Path) -> None:
    asked = []
    for kind in ("tasks", "demonstrations", "preferences"):
        paths = {split: tmp_path / f"{kind}_{split}.parquet" for split in SPLITS}
        rows = generate("chain_sum", paths, SIZES, seed=3, options={"slip_percent": 50}, kind=kind)
        asked.append({split: [row.prompt for row in found] for split, found in rows.items()})
        assert read_recipe(paths["train"]) == read_recipe(paths["eval"])
        assert (read_recipe(paths["train"]) or {}).get("kind of rows", "tasks") == kind
        if kind == "demonstrations":
            tasks = [row for row in (*rows["train"], *rows["eval"]) if isinstance(row, Task)]
            assert tasks and all(task.response == task.ground_truth for task in tasks)
            assert read_rows(paths["train"], require_response=True, split="train") == rows["train"]
    assert asked[0] == asked[1] == asked[2]


def test_the_same_arguments_write_the_same_pairs(tmp_path: Path) -> None:
    digests = []
    for i, seed in enumerate([3, 3, 4]):
        paths = {split: tmp_path / f"{split}{i}.parquet" for split in ("train", "eval")}
        generate("chain_sum", paths, SIZES, seed=seed, kind="preferences")
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths.values()])
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_generated_files_are_parquet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"taskset.train=.*t.jsonl: no such file.*parquet"):
        generate("chain_sum", {"train": tmp_path / "t.jsonl"}, SIZES, seed=1)
    assert not list(tmp_path.iterdir())
