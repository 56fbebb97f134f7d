"""Pages and sources are 120 columns wide, and cells of tables are short."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH, WORDS = 120, 12
"""Most columns of a line, and most words of a cell."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "csrc").rglob("*"))
"""Python is the linter's."""


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > WIDTH]


def wordy(text: str) -> list[str]:
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    return [cell for cell in cells if len(cell.split()) > WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_have_short_lines_and_cells(page: Path) -> None:
    text = page.read_text()
    assert (too_long(text), wordy(text)) == ([], [])


def test_sources_have_short_lines() -> None:
    files = [path for path in SOURCES if path.is_file()]
    assert len(files) > 20
    assert {str(path.relative_to(ROOT)): found for path in files if (found := too_long(path.read_text()))} == {}


def test_long_lines_and_cells_are_seen() -> None:
    assert too_long("a" * 120 + "\n" + "b" * 121) == ["b" * 121]
    assert wordy("| short | " + "word " * 13 + "|\n| a |") == [" " + "word " * 13]
