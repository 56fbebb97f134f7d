"""The pictures of the docs are those of the text files beside them."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "docs" / "images").glob("*.diagram"))


@pytest.fixture(scope="module")
def diagram() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagram", ROOT / "tools" / "diagram.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["diagram"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_pictures_are_drawn_from_their_text(diagram: ModuleType, source: Path) -> None:
    svg = source.with_suffix(".svg").read_text()
    assert svg == diagram.drawn(source.read_text()), f"run: python tools/diagram.py {source.relative_to(ROOT)}"
    shown = " ".join(ElementTree.fromstring(svg).itertext())
    boxes = [line.split(" ", 4)[4] for line in source.read_text().splitlines() if line.startswith("box ")]
    assert boxes and all(part.strip() in shown for box in boxes for part in box.split("|"))


@pytest.mark.parametrize("line", ["arrow a c x", "circle a", "box a", "arrow a b d"])
def test_a_line_that_cannot_be_drawn_is_named(diagram: ModuleType, line: str) -> None:
    text = f"box a 0 0 A\nbox b 1 1 B\nbox d 0 1 D\n{line}\n"
    with pytest.raises(diagram.DiagramError, match="f.diagram, line 4, "):
        diagram.drawn(text, "f.diagram")


def test_a_file_that_is_missing_is_named(diagram: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagram.main(["MISSING"]) == 1
    assert "'MISSING'" in capsys.readouterr().err
