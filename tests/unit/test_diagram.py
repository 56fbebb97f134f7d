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
    lines = source.read_text().splitlines()
    texts = [line.split(" ", 4)[4] for line in lines if line.startswith(("box ", "span "))]
    assert texts and all(part.strip() in shown for text in texts for part in text.split("|"))


def test_nothing_is_cut_off(diagram: ModuleType) -> None:
    """Each text ends within the picture and, of a box or span, within its frame: about 6.4 units for each letter."""
    for source in SOURCES:
        svg = ElementTree.fromstring(source.with_suffix(".svg").read_text())
        total = float(svg.get("width", "0"))
        for text in svg.iter("{http://www.w3.org/2000/svg}text"):
            classes, x = (text.get("class") or "").split(), float(text.get("x", "0"))
            width = len(text.text or "") * (7.6 if "t" in classes else 6.4)
            left = x - width * (1.0 if "e" in classes else 0.0 if "b" in classes else 0.5)
            assert left >= 0 and left + width <= total, f"{source.name}: {text.text}"
        for line in source.read_text().splitlines():
            if line.startswith("span "):
                _, _, begins, ends, label = line.split(" ", 4)
                longest = max(len(part.strip()) for part in label.split("|"))
                assert longest * 6.4 < (float(ends) - float(begins)) * diagram.UNIT_W, f"{source.name}: {label}"
            elif line.startswith("box "):
                first, *others = line.split(" ", 4)[4].split("|")
                assert max(len(first.strip()) * 7.6, *(len(part.strip()) * 6.0 for part in others)) < diagram.BOX_W, (
                    line
                )


@pytest.mark.parametrize("line", ["arrow a c x", "circle a", "box a", "arrow a b d", "span x 0 1 t", "lane"])
def test_a_line_that_cannot_be_drawn_is_named(diagram: ModuleType, line: str) -> None:
    text = f"box a 0 0 A\nbox b 1 1 B\nbox d 0 1 D\n{line}\n"
    with pytest.raises(diagram.DiagramError, match="f.diagram, line 4, "):
        diagram.drawn(text, "f.diagram")


def test_a_file_that_is_missing_is_named(diagram: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagram.main(["MISSING"]) == 1
    assert "'MISSING'" in capsys.readouterr().err
