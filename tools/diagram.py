#!/usr/bin/env python3
"""Draw the SVG pictures of docs/images from the text files beside them.

    python tools/diagram.py docs/images/*.diagram

A picture is a grid of boxes, or lanes in which time runs to the right. Lines of a text file:

    title TEXT
    box NAME COLUMN ROW TEXT | SMALLER TEXT | ...
    arrow FROM TO TEXT | TEXT          (the boxes share a column or a row)
    lane NAME TEXT | SMALLER TEXT      (a row, below the one before)
    span LANE BEGIN END TEXT | SMALLER TEXT
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

CELL_W, CELL_H, BOX_W, BOX_H, MARGIN, LINE = 300, 150, 190, 76, 24, 16
LANE_H, LABEL_W, UNIT_W = 64, 150, 76
"""Height of a lane, width of its label, width of one unit of time."""
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:13px;fill:#222;text-anchor:middle}"
    ".t{font-weight:bold;font-size:14px}.m{font-size:12.5px}.s{font-size:11.5px;fill:#555}"
    ".e{text-anchor:end}.b{text-anchor:start}"
    "rect{fill:#f4f7fb;stroke:#4a6fa5;stroke-width:1.5;rx:8}line{stroke:#4a6fa5;stroke-width:1.5;marker-end:url(#a)}"
)


class DiagramError(ValueError):
    """A line that cannot be drawn; the text names the file, the line and the fix."""


@dataclass(frozen=True)
class Box:
    column: int
    row: int
    lines: tuple[str, ...]

    @property
    def centre(self) -> tuple[float, float]:
        return MARGIN + self.column * CELL_W + BOX_W / 2, 2 * MARGIN + self.row * CELL_H + BOX_H / 2


def drawn(text: str, name: str = "diagram") -> str:
    """Return the SVG of a text file. Raises DiagramError."""
    title, boxes, arrows = "", dict[str, Box](), list[str]()
    lanes, spans = dict[str, int](), list[str]()
    end = 0.0
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.partition(" ")
        try:
            if word == "title":
                title = rest
            elif word == "box":
                key, column, row, label = rest.split(" ", 3)
                boxes[key] = Box(int(column), int(row), _parts(label))
            elif word == "arrow":
                source, target, *label = rest.split(" ", 2)
                arrows.append(_arrow(boxes[source], boxes[target], _parts("".join(label))))
            elif word == "lane":
                key, label = rest.split(" ", 1)
                lanes[key] = len(lanes)
                spans.append(_label(lanes[key], _parts(label)))
            elif word == "span":
                key, begins, ends, label = rest.split(" ", 3)
                spans.append(_span(lanes[key], float(begins), float(ends), _parts(label)))
                end = max(end, float(ends))
            elif line.strip():
                raise DiagramError("begin it with title, box, arrow, lane or span")
        except (ValueError, KeyError) as error:
            raise DiagramError(f"{name}, line {number}, {line!r}: {error}") from error
    if lanes:
        width, height = 2 * MARGIN + LABEL_W + end * UNIT_W, 2 * MARGIN + len(lanes) * LANE_H
    else:
        width = 2 * MARGIN + max(box.column for box in boxes.values()) * CELL_W + BOX_W
        height = 3 * MARGIN + max(box.row for box in boxes.values()) * CELL_H + BOX_H
    body = [*arrows, *(_box(box) for box in boxes.values()), *spans]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L10 5L0 10z" fill="#4a6fa5"/></marker></defs>',
            f'<rect x="0" y="0" width="{width:g}" height="{height:g}" style="fill:#fff;stroke:none"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def _box(box: Box) -> str:
    x, y = box.centre
    classes = ["t", *["s"] * (len(box.lines) - 1)]
    return f'<rect x="{x - BOX_W / 2:g}" y="{y - BOX_H / 2:g}" width="{BOX_W}" height="{BOX_H}"/>' + _text(
        x, y, box.lines, classes
    )


def _arrow(source: Box, target: Box, label: Sequence[str]) -> str:
    (x, y), (u, v) = source.centre, target.centre
    dx, dy = target.column - source.column, target.row - source.row
    if bool(dx) == bool(dy):
        raise DiagramError("an arrow runs along a row or a column; put its boxes there")
    if dx:
        way = 1 if dx > 0 else -1
        y = v = y + 9 * way  # two arrows between the same boxes lie side by side
        x, u = x + way * BOX_W / 2, u - way * BOX_W / 2
        middle = ((x + u) / 2, y + (LINE * len(label) / 2 + 8) * way)
    else:
        way = 1 if dy > 0 else -1
        x = u = x - 30 * way
        y, v = y + way * BOX_H / 2, v - way * BOX_H / 2
        middle = (x - 6 * way, (y + v) / 2)
    at = "s" if dx else ("s e" if way > 0 else "s b")
    return f'<line x1="{x:g}" y1="{y:g}" x2="{u:g}" y2="{v:g}"/>' + _text(*middle, label, [at] * len(label))


def _label(lane: int, lines: Sequence[str]) -> str:
    y = MARGIN + (lane + 0.5) * LANE_H
    return _text(MARGIN + LABEL_W - 12, y, lines, ["t e", *["s e"] * (len(lines) - 1)])


def _span(lane: int, begins: float, ends: float, lines: Sequence[str]) -> str:
    x, y = MARGIN + LABEL_W + begins * UNIT_W, MARGIN + lane * LANE_H + 6
    width, height = (ends - begins) * UNIT_W - 3, LANE_H - 12
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" style="rx:4"/>'
    return rect + _text(x + width / 2, y + height / 2, lines, ["m", *["s"] * (len(lines) - 1)])


def _text(x: float, y: float, lines: Sequence[str], classes: Iterable[str]) -> str:
    top = y - (len(lines) - 1) * LINE / 2 + 4
    rows = zip(lines, classes, strict=True)
    return "".join(
        f'<text x="{x:g}" y="{top + i * LINE:g}" class="{c}">{escape(line)}</text>' for i, (line, c) in enumerate(rows)
    )


def main(paths: Sequence[str]) -> int:
    """Draw each file beside itself; return the exit status."""
    for path in map(Path, paths):
        try:
            path.with_suffix(".svg").write_text(drawn(path.read_text(), str(path)))
        except (DiagramError, OSError) as error:  # the text of an OSError has the file's name
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
