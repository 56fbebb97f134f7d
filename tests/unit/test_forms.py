"""Rows in the forms of other projects are read as they are: ShareGPT, HH-RLHF, ORZ, lists in JSON, one image, levels in
words, times and NaN."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.buffer.store import Store
from megarl.config.rewards import RewardConfig
from megarl.core.errors import DataError
from megarl.core.schema import Task
from megarl.rewards.code_tests import Asserts, Cases, parse
from megarl.rewards.routes import check_row
from megarl.tasks import difficulty_of, read_preferences, read_rows
from megarl.tasks.image_rows import png_of
from megarl.tasks.row_files import json_value
from tests.unit.small_rows import write

SUFFIXES = ("jsonl", "json", "parquet")
JUDGED = {"data_source": "math", "reward_model": {"style": "rule", "ground_truth": "2"}}
USER, SYSTEM = {"role": "user", "content": "1 + 1?"}, {"role": "system", "content": "s"}


def says(speaker: str, text: str | None) -> dict[str, Any]:
    return {"from": speaker, "value": text}


ASKED = says("human", "1 + 1?")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_sharegpt_is_read_as_every_kind_of_row(tmp_path: Path, suffix: str) -> None:
    chat = {"conversations": [says("system", "s"), ASKED, says("gpt", "2")]}
    [demonstration] = read_rows(write(tmp_path / f"d.{suffix}", [chat]), require_response=True)
    assert (demonstration.prompt, demonstration.response) == ((SYSTEM, USER), "2")
    [task] = read_rows(write(tmp_path / f"t.{suffix}", [chat | JUDGED]))
    assert (task.prompt, task.response, task.ground_truth) == ((SYSTEM, USER), None, "2")
    pair = {"conversations": [ASKED], "system": "s", "chosen": says("gpt", "2"), "rejected": says("gpt", "3")}
    [preference] = read_preferences(write(tmp_path / f"p.{suffix}", [pair]))
    assert (preference.prompt, preference.chosen, preference.rejected) == ((SYSTEM, USER), "2", "3")


def test_sharegpt_may_be_in_a_named_column_or_json_text(tmp_path: Path) -> None:
    chat = [ASKED, {**says("gpt", "2"), "weight": 1}]
    for name, value in (("dialog.jsonl", chat), ("text.jsonl", json.dumps(chat))):
        path = write(tmp_path / name, [{"dialog": value}])
        [row] = read_rows(path, require_response=True, columns={"messages": "dialog"})
        assert (row.prompt, row.response) == ((USER,), "2")


def test_calls_and_results_of_sharegpt_are_those_of_chat_templates(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [ASKED, says("function_call", json.dumps(call)), says("observation", "2"), says("gpt", "It is 2.")]
    [row] = read_rows(write(tmp_path / "d.jsonl", [{"conversations": turns}]), require_response=True)
    assert [message["role"] for message in row.prompt] == ["user", "assistant", "tool"]
    assert row.prompt[1]["tool_calls"] == [{"type": "function", "function": call}]


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ([ASKED, says("robot", "2")], r"messages\[1\] must be a message {role, content}, got {'from': 'robot'"),
        ([ASKED, says("gpt", "")], r"messages\[1\].content must be a non-empty"),
        ([ASKED], r"messages\[0\].role must be assistant"),
        ([], "messages must be a non-empty list"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, turns: list[Any], field: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"conversations": [ASKED, says("gpt", "2")]}, {"conversations": turns}])
    with pytest.raises(DataError, match=f"d.jsonl: line 2: {field}"):
        read_rows(path, require_response=True)


def test_a_row_of_orz_without_a_ground_truth_is_named(tmp_path: Path) -> None:
    whole = [ASKED, {"from": "assistant", "ground_truth": {"value": "2"}}]
    path = tmp_path / "orz.json"
    path.write_text(json.dumps([whole, [ASKED, {"from": "assistant"}]]))
    with pytest.raises(DataError, match=r"orz.json: .*2: .*reward_model"):
        read_rows(path, data_source="math")


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_json_of_too_many_levels_is_an_error_of_its_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(DataError, match=name):
        read_rows(path)


def test_texts_and_rows_that_have_a_from_stay_what_they_are(tmp_path: Path) -> None:
    """Only speakers that ShareGPT knows make a message."""
    rows = [{"from": "arxiv", "prompt": '[{"from": "Berlin", "value": "12"}]', **JUDGED}] * 2
    for text in (json.dumps(rows), json.dumps(rows, indent=1)):
        (tmp_path / "rows.json").write_text(text)
        assert [row.prompt[0]["content"] for row in read_rows(tmp_path / "rows.json")] == [rows[0]["prompt"]] * 2


def transcript(*texts: str) -> str:
    return "".join(f"\n\n{'Assistant' if i % 2 else 'Human'}: {text}" for i, text in enumerate(texts))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_transcripts_of_hh_rlhf_share_their_prompt(tmp_path: Path, suffix: str) -> None:
    before = ("Hi: Human?", "Yes,\n\nwell.", "1 + 1?")
    pair = {"chosen": transcript(*before, "2"), "rejected": transcript(*before, "3")}
    [row] = read_preferences(write(tmp_path / f"p.{suffix}", [pair]))
    assert [message["content"] for message in row.prompt] == list(before)
    assert (row.chosen, row.rejected) == ("2", "3")
    [asked] = read_preferences(write(tmp_path / f"q.{suffix}", [{"prompt": transcript("1 + 1?", ""), **ANSWERS}]))
    assert (asked.prompt, asked.chosen) == ((USER,), "2")
    other = pair | {"rejected": transcript("Hello?", "Yes.", "1 + 1?", "3")}
    with pytest.raises(DataError, match="rejected must be an answer to the same messages as chosen"):
        read_preferences(write(tmp_path / f"o.{suffix}", [other]))


ANSWERS = {"chosen": "2", "rejected": "3"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_of_orz_have_their_answer_in_the_messages(tmp_path: Path, suffix: str) -> None:
    rows: list[Any] = [
        [says("human", f"1 + {number}?"), {"from": "assistant", "ground_truth": {"value": str(1 + number)}}]
        for number in (1, 2)
    ]
    if suffix == "parquet":
        rows = [{"0": asked, "1": answer} for asked, answer in rows]
    found = read_rows(write(tmp_path / f"o.{suffix}", rows), data_source="math")
    assert [(row.prompt[-1]["content"], row.ground_truth) for row in found] == [("1 + 1?", "2"), ("1 + 2?", "3")]
    assert len(read_rows(write(tmp_path / f"one.{suffix}", rows[:1]), data_source="math")) == 1


def test_columns_that_are_numbers_may_be_anything(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [{"0": "1 + 1?", "1": "2"}])
    [row] = read_rows(path, columns={"prompt": "0", "ground_truth": "1"}, data_source="math")
    assert (row.prompt, row.ground_truth) == ((USER,), "2")


def test_a_json_file_is_a_list_or_has_lines(tmp_path: Path) -> None:
    row = {"prompt": "1 + 1?", **JUDGED}
    lines = tmp_path / "lines.json"
    lines.write_text(f"\n{json.dumps(row)}\n{json.dumps(row)}\n")
    assert len(read_rows(lines)) == len(read_rows(write(tmp_path / "list.json", [row, row]))) == 2
    with pytest.raises(DataError, match=r"list.json: row 2: prompt must be"):
        read_rows(write(tmp_path / "list.json", [row, row | {"prompt": 3}]))
    lines.write_text(f"\n{json.dumps(row)}\n{json.dumps(row | {'prompt': 3})}\n")
    with pytest.raises(DataError, match=r"lines.json: line 3: prompt must be"):
        read_rows(lines)
    for text, words in (("[\n{}", "is no JSON list of rows"), ('["a"]', "row 1 must be a JSON object")):
        lines.write_text(text)
        with pytest.raises(DataError, match=words):
            read_rows(lines)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_image_needs_no_list_and_no_placeholder(tmp_path: Path, suffix: str) -> None:
    picture = png_of(np.zeros((4, 4, 3), np.uint8))
    (tmp_path / "a.png").write_bytes(picture)
    image = {"bytes": picture, "path": None} if suffix == "parquet" else {"bytes": None, "path": "a.png"}
    chat = {"conversations": [says("system", "s"), ASKED, says("gpt", "2")]}
    for given in ({"image": image}, {"image": image, "images": None}):
        [row] = read_rows(write(tmp_path / f"t.{suffix}", [{"prompt": "1 + 1?", **JUDGED, **given}]))
        assert (row.images, row.prompt[0]["content"]) == ((picture,), "<image>1 + 1?")
        [row] = read_rows(write(tmp_path / f"d.{suffix}", [chat | given]), require_response=True)
        assert (row.images, row.prompt[1]["content"]) == ((picture,), "<image>1 + 1?")
    [row] = read_rows(write(tmp_path / f"p.{suffix}", [{"prompt": "1 + 1? <image>", **JUDGED, "image": image}]))
    assert (row.images, row.prompt[0]["content"]) == ((picture,), "1 + 1? <image>")
    [pair] = read_preferences(write(tmp_path / f"pair.{suffix}", [{"prompt": "1 + 1?", **ANSWERS, "image": image}]))
    assert pair.images == (picture,)


@pytest.mark.parametrize(
    ("given", "number"),
    [
        *((text, 2.0) for text in ("easy", "Easy", " EASY ", "introductory")),
        *(("medium", 3.0), ("MEDIUM_HARD", 4.0), ("hard", 5.0), ("very-hard", 6.0)),
        *(("Level 5", 5.0), ("3.5", 3.5), ("level_7", 7.0), ("-1", -1.0), (4, 4.0)),
        *((text, None) for text in ("Level ?", "", "no idea", "1e3", "٣", None, True, math.nan)),
    ],
)
def test_difficulties_are_numbers_or_words(given: Any, number: float | None) -> None:
    task = Task("t", "math", (), "", {}, {"metadata": {"level": given}})
    assert difficulty_of(task, "metadata.level") == number


def test_names_of_difficulties_may_have_dots() -> None:
    """Skywork-OR1's rows name a model."""
    task = Task("t", "math", (), "", {}, {"model_difficulty": {"Qwen-1.5B": 3, "a": {"b": 4}}, "x.y": 5, "x": {"z": 6}})
    keys = ("model_difficulty.Qwen-1.5B", "model_difficulty.a.b", "x.y", "x.z", "model_difficulty.Qwen-1", "x.y.z", "x")
    assert [difficulty_of(task, key) for key in keys] == [3.0, 4.0, 5.0, 6.0, None, None, None]


def test_words_of_difficulty_are_in_order() -> None:
    found = [
        difficulty_of(Task("t", "math", (), "", {}, {"level": word}), "level")
        for word in ("very easy", "easy", "medium", "medium hard", "hard", "very hard")
    ]
    assert found == sorted(set(found), key=lambda value: value or 0)


DAY = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (math.nan, None),
        (math.inf, None),
        (np.float64("nan"), None),
        (DAY, "2024-01-02T03:04:05.678901"),
        (DAY.replace(tzinfo=datetime.UTC), "2024-01-02T03:04:05.678901+00:00"),
        (DAY.date(), "2024-01-02"),
        (DAY.time(), "03:04:05.678901"),
        (datetime.timedelta(minutes=1.5), 90.0),
        (Decimal("2.00"), 2),
        (Decimal("0.5"), 0.5),
        (Decimal("0.1000000000000000000001"), "0.1000000000000000000001"),
        (Decimal("NaN"), None),
        ([{"a": (1, math.nan)}], [{"a": [1, None]}]),
        ("text", "text"),
    ],
)
def test_values_become_those_of_json(given: Any, kept: Any) -> None:
    found = json_value(given)
    assert (found, type(found)) == (kept, type(kept))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_and_nan_of_a_table_are_the_same_after_a_restart(tmp_path: Path, unit: str) -> None:
    """The start of a run compares the store's tasks with the file's: a NaN, equal to nothing, made them differ."""
    times = pa.array([1_704_164_645], pa.timestamp("s")).cast(pa.timestamp(unit))
    if unit == "ns":
        times = pa.array([1_704_164_645_000_000_001], pa.timestamp("ns"))
    info = pa.StructArray.from_arrays(
        [times, pa.array([[0.5, math.nan]]), pa.array([[DAY]], pa.list_(pa.timestamp("ns")))], ["at", "scores", "all"]
    )
    table = pa.table({"prompt": ["q"], "data_source": ["math"], "reward_model": [{"ground_truth": "2"}]})
    pq.write_table(table.append_column("extra_info", info), tmp_path / "t.parquet")
    [row] = read_rows(tmp_path / "t.parquet")
    assert row.extra_info == {"at": "2024-01-02T03:04:05", "scores": [0.5, None], "all": ["2024-01-02T03:04:05.678901"]}
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    store.tasks.add("train", [row])
    assert store.tasks.read("train") == read_rows(tmp_path / "t.parquet", split="t")
    store.close()


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        ("train-math-deepscaler", '["\\\\frac{1}{2}", "0.5"]'),
        (
            "test-code-leetcode-Easy",
            json.dumps({"entry_point": "f", "test_code": "def check(c):\n    assert c(1) == 2"}),
        ),
        ("train-code-taco-very_hard", json.dumps({"inputs": ["1"], "outputs": ["2"], "test_code": None})),
    ],
)
def test_data_sources_of_skywork_have_verifiers(source: str, truth: str) -> None:
    check_row(source, truth, {}, RewardConfig())
    with pytest.raises(DataError):
        check_row(source, "", {}, RewardConfig())


NOT_FILLED = {"inputs": None, "outputs": None, "fn_name": None, "assert_case": None}


@pytest.mark.parametrize("nothing", [None, []])
def test_rows_of_skywork_are_read(nothing: Any) -> None:
    code = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(a = 2, b = 2) == 4\n"
    empty = dict.fromkeys(NOT_FILLED, nothing)
    prefix = "import math\n\nclass ListNode:\n    pass\n"
    truth = {**empty, "entry_point": "Solution().add", "import_prefix": prefix, "test_code": code}
    row = parse(json.dumps(truth))
    assert isinstance(row, Asserts)
    assert row.checks.tests == ("assert candidate(1, 2) == 3", "assert candidate(a = 2, b = 2) == 4")
    assert (row.checks.entry, row.checks.setup, row.prompt) == ("add", "", prefix)
    stateful = parse(truth | {"test_code": "def check(candidate):\n    x = candidate(1)\n    assert x == 2\n"})
    assert isinstance(stateful, Asserts) and stateful.checks.tests[0].endswith("\ncheck(candidate)")
    cases = parse({**truth, "test_code": nothing, "inputs": ["1"], "outputs": ["2"]})
    assert isinstance(cases, Cases)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entry_point": None}, "needs entry_point too"),
        ({"entry_point": "f(); g"}, "must be a function's name"),
        ({"test_code": "def check(:"}, "do not parse"),
        ({"test_code": "def check(candidate):\n    assert candidate(ListNode()) == 3"}, "uses 'ListNode'"),
    ],
)
def test_rows_of_skywork_that_cannot_be_judged_are_refused(changes: dict[str, Any], words: str) -> None:
    code = "def check(candidate):\n    assert candidate(1) == 3"
    truth = {"entry_point": "f", "import_prefix": "class ListNode:\n    pass\n", "test_code": code}
    with pytest.raises(DataError, match=words):
        parse(truth | changes)
