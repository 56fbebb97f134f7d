"""The glossary stays a glossary: few terms, short meanings, each term once."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
TERMS, WORDS = 40, 12
"""Most terms of the page, and most words of a cell."""


def rows() -> list[list[str]]:
    """Cells of every row of the table, without its head."""
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_terms_are_few_and_each_is_there_once() -> None:
    terms = [row[0] for row in rows()]
    assert 0 < len(terms) <= TERMS and len(set(terms)) == len(terms)


def test_every_row_has_three_short_cells() -> None:
    assert [row for row in rows() if len(row) != 3 or any(len(cell.split()) > WORDS for cell in row)] == []
