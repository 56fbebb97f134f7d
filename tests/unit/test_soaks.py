"""The pages of ``make soak`` and ``make compat``: what ran, at which commit, and how it ended."""

from __future__ import annotations

import json

import pytest

from tests import same
from tests.compat import COMPAT
from tests.mutants import MUTANTS, Mutant, faults
from tests.parts import ROOT, Parts, last_words
from tests.soaks import SOAKS

LINE = {"command": "c", "result": "3 passed", "minutes": "2", "commit": "abc", "date": "2026-11-24", "status": "0"}


def test_a_part_has_one_line_in_the_order_of_the_parts() -> None:
    found = {"kills": {**LINE, "result": "9 runs"}, "grids": LINE}
    lines = SOAKS.table(found).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| grids", "| kills"]
    assert lines[3] == "| kills | `c` | 9 runs | 2 | abc | 2026-11-24 |"


def test_the_table_is_replaced_and_the_text_around_it_stays() -> None:
    page = SOAKS.with_table(SOAKS.page.read_text() + "more\n", {"grids": LINE})
    assert page == SOAKS.with_table(page, {"grids": LINE}) and page.endswith("more\n")
    assert SOAKS.with_table(page, {}).count("3 passed") == 0 and page.count("3 passed") == 1
    with pytest.raises(ValueError, match="no <!-- begin"):
        SOAKS.with_table("# Soak\n", {})


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("..\n11 passed, 2 deselected in 3.20s\n", "11 passed, 2 deselected"),
        ("=== 1 failed, 2 passed in 4s ===\n", "1 failed, 2 passed"),
        ("a\n\n 30 runs are equal | all \n\n", "30 runs are equal / all"),
        ("", "no output"),
    ],
)
def test_a_part_is_told_by_its_counts_or_its_last_line(output: str, words: str) -> None:
    assert last_words(output) == words


@pytest.mark.parametrize("parts", [SOAKS, COMPAT], ids=lambda parts: parts.name)
def test_the_parts_are_there(parts: Parts) -> None:
    for command in parts.commands.values():
        for word in command:
            assert not (word.startswith("tests/") or word.endswith(".py")) or (ROOT / word).exists()
    assert "|---|" in parts.with_table(parts.page.read_text(), {})


def test_references_have_every_job_and_differences_are_named() -> None:
    names = {f"{name} {seed}" for name in same.JOBS for seed in same.SEEDS}
    files = sorted(same.FOLDER.glob("*.json"))
    assert files and all(json.loads(file.read_text()).keys() == names for file in files)
    assert same.differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}) == [
        "c: missing",
        "d: not in the reference",
        "b: 3, recorded 2",
    ]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_every_mutant_can_be_put_into_the_source(mutant: Mutant) -> None:
    assert faults(mutant) is None
