"""Answers that math-verify, verl's math_dapo and megarl judge otherwise; docs/rewards_math.md shows some."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from megarl.rewards import compute_score

ROOT = Path(__file__).parents[2]
ROWS = [
    tuple(line.split("\t"))
    for line in (ROOT / "tests" / "unit" / "cases" / "graders.tsv").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
WORDS = {True: "right", False: "wrong"}


def response_of(answer: str) -> str:
    return answer[2:].replace("⏎", "\n") if answer.startswith("> ") else f"\\boxed{{{answer}}}"


def test_every_row_is_a_disagreement() -> None:
    assert len(ROWS) >= 25 and len({row[:2] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert set(row[2:5]) == {"right", "wrong"} and row[5], row
    for place in (2, 3):
        assert {row[4] for row in ROWS if row[4] != row[place]} == {"right", "wrong"}, "in both directions"


@pytest.mark.parametrize(("gold", "answer", "ours"), [(row[0], row[1], row[4]) for row in ROWS])
def test_verdicts_are_the_listed_ones(gold: str, answer: str, ours: str) -> None:
    assert WORDS[compute_score("math", response_of(answer), gold)["status"] == "ok"] == ours


def test_verdicts_of_math_verify_are_the_listed_ones() -> None:
    from math_verify import parse, verify

    assert importlib.metadata.version("math-verify") == "0.9.0"
    for gold, answer, theirs, *_ in ROWS:
        assert WORDS[verify(parse(f"\\boxed{{{gold}}}"), parse(response_of(answer)))] == theirs, (gold, answer)


def test_rows_of_the_page_are_rows_of_the_file() -> None:
    page = (ROOT / "docs" / "rewards_math.md").read_text(encoding="utf-8")
    section = page.partition("## Where graders disagree")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    assert table and set(table) <= {
        f"| `{answer.removeprefix('> ')}` | `{gold}` | {' | '.join(verdicts)} |" for gold, answer, *verdicts in ROWS
    }
