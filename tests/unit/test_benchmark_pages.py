"""What a benchmark writes into a page: where it was measured, between marks that leave people's sentences alone."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    monkeypatch.delitem(sys.modules, "page", raising=False)
    import page

    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/loop.py", "--steps", "2"])
    (tmp_path / "docs").mkdir()
    return page


def test_a_part_is_replaced_and_the_text_around_it_stays(page: object, tmp_path: Path) -> None:
    path = tmp_path / "docs" / "loop.md"
    path.write_text("# Title\n\nA sentence.\n")
    page.write("loop.md", "| a | 1 |")  # type: ignore[attr-defined]
    path.write_text(path.read_text() + "\nAnother sentence.\n")
    page.write("loop.md", "| a | 2 |")  # type: ignore[attr-defined]
    text = path.read_text()
    assert text.startswith("# Title\n\nA sentence.\n\n<!-- benchmarks/loop.py: begin") and text.endswith(
        "\nAnother sentence.\n"
    )
    assert "| a | 2 |" in text and "| a | 1 |" not in text and text.count("benchmarks/loop.py: end") == 1
    assert re.search(
        r"Measured by `python .*loop.py --steps 2` at commit \S+, \d{4}-\d\d-\d\d: \d+ cores \(.*\), \d+ GiB, .*; load "
        r"\d",
        " ".join(text.split()),
    )


def test_every_script_writes_its_part_by_the_one_function() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {
        "page.py",
        "jobs.py",
        "learning.py",
        "exam_trl.py",  # `megarl exam --peer` writes it
    }
    assert {name for name in scripts if "page.write(" not in (ROOT / "benchmarks" / name).read_text()} == set()
    pages = {path.name for path in (ROOT / "docs" / "benchmarks").glob("*.md")} - {"exam.md"}  # `megarl exam` writes it
    assert {
        name
        for name in pages
        if not re.search(
            rf"<!-- benchmarks/{name[:-3]}\.py( \w+)?: begin", (ROOT / "docs" / "benchmarks" / name).read_text()
        )
    } == set()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on the PATH")
def test_no_cuda_kernel_spills_and_the_page_lists_them_all() -> None:
    import ptxas

    text = (ROOT / "docs" / "benchmarks" / "kernels.md").read_text()
    for source in ptxas.kernel_sources():
        for kernel, usage in ptxas.usage_of(source, "sm_90a").items():
            assert usage.spilled == 0, f"{kernel} of {source} spills {usage.spilled} bytes a thread"
            assert f"| {source.parent.name}: `{kernel}` | " in text
