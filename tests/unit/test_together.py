"""The processes of ``make test``."""

from __future__ import annotations

from pathlib import Path

from tests.together import PARTS, files

ROOT = Path(__file__).resolve().parents[2]


def test_each_file_of_tests_is_run_by_one_process() -> None:
    every = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_*.py"))
    assert sorted(file for part in PARTS for file in files(part)) == every
