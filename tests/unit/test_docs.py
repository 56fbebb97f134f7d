"""Pages name files that exist, link to pages that exist, and are all linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = (ROOT, ROOT / "megarl", *(path for path in (ROOT / "megarl").iterdir() if path.is_dir()))
"""Folders that a file may be named relative to."""


def links(page: Path) -> list[Path]:
    """Files that a page links to, without those of other sites and without anchors."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    return [(page.parent / link).resolve() for link in found if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [str(link) for link in links(page) if not link.exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    while more := {link for page in reached if page.suffix == ".md" for link in links(page)} - reached:
        reached |= more
    assert [str(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`([\w./]+\.(?:py|md|yaml|sh))`", (ROOT / page).read_text())
    assert named and [name for name in named if not any((place / name).is_file() for place in PLACES)] == []
