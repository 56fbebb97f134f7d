"""Odd training rows: lost, equal, or with their answer in the prompt."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config import Config
from megarl.core.schema import Task
from megarl.run.run_dir.odd_rows import num_rows, odd


def task(number: int, question: str, truth: str) -> Task:
    return Task(f"train/{number}", "math", ({"role": "user", "content": question},), "math", {"ground_truth": truth})


def test_odd_rows_are_named_and_usual_ones_are_not() -> None:
    sums = [task(i, f"{i} + {i} =", str(2 * i)) for i in range(40)]
    options = [task(i, f"Question {i}\nA) one\nB) two\nC) three\nD) four", "ABCD"[i % 4]) for i in range(40)]
    assert odd(sums, Config()) == odd(options, Config()) == {}
    assert set(odd([task(i, f"{i} + {i} = {2 * i}", str(2 * i)) for i in range(40)], Config())) == {"answer-in-prompt"}
    assert set(odd([task(i, "=", str(i)) for i in range(40)], Config())) == {"same-prompts"}
    assert set(odd(sums[:4] * 10, Config())) == {"duplicates"}


def test_rows_of_a_file_are_counted_without_reading_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert (num_rows(tmp_path / "a.parquet"), num_rows(tmp_path / "a.jsonl")) == (3, 2)
    assert num_rows(tmp_path) is None
