"""The glossary stays a glossary: few terms, short meanings, each term once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
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


RETIRED = re.compile(
    r"\b(pulses?|sentinels?|patience|mend(s|ed|ing)?|for\s+ever|anew|signs?\s+of\s+life|unjudgeable|lasting\s*error|"
    r"knows?\s+no\s+keys?|programs?\s+that\s+nobody\s+has\s+read|groups?\s+that\s+says?\s+nothing)\b",
    re.IGNORECASE,
)
"""Of the third column, what no English sentence of this project needs in another sense."""
TOLD = ("CHANGELOG.md", "docs/glossary.md", "tests/unit/test_glossary.py", "tests/data/")
"""Places that name what was, and texts of others."""


FOLDERS = ("megarl", "csrc", "configs", "slurm", "tests", "tools", "benchmarks", "docs")
KINDS = (".py", ".md", ".yaml", ".sh", ".h", ".cpp", ".cu")


def test_retired_words_are_gone() -> None:
    files = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    found = {}
    for path in files:
        name = str(path.relative_to(ROOT))
        if path.suffix in KINDS and not name.startswith(TOLD) and (match := RETIRED.search(path.read_text())):
            found[name] = match[0]
    assert len(files) > 500 and found == {}
