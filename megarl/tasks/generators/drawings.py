"""Questions about generated pictures: count shapes, compare two shapes, read a digit."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.config.bounds import Bound
from megarl.core.errors import ConfigError
from megarl.tasks.generators.entries import Entries, Entry
from megarl.tasks.image_rows import PLACEHOLDER

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

COLORS = {
    "red": (220, 30, 30),
    "blue": (30, 60, 230),
    "green": (20, 160, 60),
    "yellow": (240, 210, 20),
    "purple": (150, 40, 180),
}
FORMS = ("square", "circle", "triangle")
OPTIONS = {
    "size": 28,
    "cells": 2,
    "colors": 3,
    "min_shapes": 1,
    "max_shapes": 4,
    "count": 1,
    "side": 1,
    "digit": 1,
    "slip_percent": 0,
}
"""Options and their defaults. ``size``: width and height in pixels. Shapes lie in a grid of ``cells`` x ``cells``, at
most one in each. ``colors``: how many of ``COLORS`` occur. ``min_shapes``, ``max_shapes``: shapes of a picture to be
counted. ``count``, ``side``, ``digit``: shares of the three kinds of questions; 0 leaves one out."""
BOUNDS = {
    "size": Bound(16, 1024),
    "cells": Bound(2, 16),
    "colors": Bound(2, len(COLORS)),
    "min_shapes": Bound(1, 256),
    "max_shapes": Bound(1, 256),
    "count": Bound(0),
    "side": Bound(0),
    "digit": Bound(0),
}
KINDS = ("count", "side", "digit")
PAPER, INK = (255, 255, 255), (0, 0, 0)
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
"""Strokes of each digit, as on a display of seven segments: independent of fonts."""
STROKES = {
    "a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2), "f": (0, 0, 0, 1), "g": (0, 1, 1, 1),
}  # fmt: skip
"""Ends of each stroke, x0 y0 x1 y1, in a field one wide and two high."""

Cell = tuple[int, int]
"""Column and row in the grid."""


def shapes(seed: int, settings: Mapping[str, int]) -> Entries:
    """Pictures with a question: ``<image>How many red shapes?`` (``vision/count``), ``<image>Where is the red shape?
    A) left B) right`` (``vision/choice``), ``<image>Which digit?`` (``vision/anls``).

    Raises ConfigError for options that do not go together.
    """
    _check(settings)
    dice = random.Random(seed)
    shares = [settings[kind] for kind in KINDS]
    while True:
        yield ASK[dice.choices(KINDS, shares)[0]](dice, settings)


def _check(settings: Mapping[str, int]) -> None:
    if not any(settings[kind] for kind in KINDS):
        raise ConfigError(f"taskset.options: {', '.join(KINDS)} are all 0, so shapes asks nothing; set one above 0")
    if settings["size"] < 8 * settings["cells"]:
        raise ConfigError(
            f"taskset.options.size={settings['size']} leaves shapes less than 8 pixels in {settings['cells']} cells; "
            f"set it to {8 * settings['cells']} or more, or lower taskset.options.cells"
        )
    if settings["max_shapes"] > settings["cells"] ** 2:
        raise ConfigError(
            f"taskset.options.max_shapes={settings['max_shapes']} do not fit into {settings['cells']} x "
            f"{settings['cells']} cells; lower it, or raise taskset.options.cells"
        )


def _count(dice: random.Random, settings: Mapping[str, int]) -> Entry:
    """Return a counting question; every number from 0 to ``max_shapes`` is equally likely."""
    colors, most = list(COLORS)[: settings["colors"]], settings["max_shapes"]
    asked, right = dice.choice(colors), dice.randint(0, most)
    number = dice.randint(max(right, settings["min_shapes"]), most)
    others = [dice.choice([color for color in colors if color != asked]) for _ in range(number - right)]
    cells = dice.sample(_grid(settings["cells"]), number)
    picture = _shapes(dice, settings, list(zip(cells, [asked] * right + others, strict=True)))
    return _entry(f"How many {asked} shapes?", str(right), str(right + 1), "vision/count", picture)


def _side(dice: random.Random, settings: Mapping[str, int]) -> Entry:
    """Two shapes of two colours in two columns."""
    left, right = dice.sample(list(COLORS)[: settings["colors"]], 2)
    columns = sorted(dice.sample(range(settings["cells"]), 2))
    cells = [(column, dice.randrange(settings["cells"])) for column in columns]
    picture = _shapes(dice, settings, list(zip(cells, (left, right), strict=True)))
    asked = dice.choice((left, right))
    answer, slip = "AB" if asked == left else "BA"
    return _entry(f"Where is the {asked} shape? A) left B) right", answer, slip, "vision/choice", picture)


def _digit(dice: random.Random, settings: Mapping[str, int]) -> Entry:
    digit, slip = dice.sample(range(10), 2)
    return _entry(
        "Which digit?", str(digit), str(slip), "vision/anls", _drawn(settings, _strokes(dice, settings, digit))
    )


ASK: Mapping[str, Callable[[random.Random, Mapping[str, int]], Entry]] = {
    "count": _count,
    "side": _side,
    "digit": _digit,
}


def _entry(question: str, answer: str, slip: str, data_source: str, picture: bytes) -> Entry:
    return Entry(PLACEHOLDER + question, answer, answer, slip, data_source, "vision", images=(picture,))


def _grid(cells: int) -> list[Cell]:
    return [(column, row) for row in range(cells) for column in range(cells)]


def _shapes(dice: random.Random, settings: Mapping[str, int], placed: Sequence[tuple[Cell, str]]) -> bytes:
    """Return a PNG file with a slightly shifted shape of random form and size in each named cell."""
    width = settings["size"] // settings["cells"]

    def draw(on: ImageDraw) -> None:
        for (column, row), color in placed:
            side = dice.randint(width // 2, width - 2)
            x = column * width + dice.randint(1, width - 1 - side)
            y = row * width + dice.randint(1, width - 1 - side)
            _shape(on, dice.choice(FORMS), (x, y, x + side - 1, y + side - 1), COLORS[color])

    return _drawn(settings, draw)


def _shape(on: ImageDraw, form: str, box: tuple[int, int, int, int], color: tuple[int, int, int]) -> None:
    x0, y0, x1, y1 = box
    if form == "square":
        on.rectangle(box, fill=color)
    elif form == "circle":
        on.ellipse(box, fill=color)
    else:
        on.polygon([(x0, y1), (x1, y1), ((x0 + x1) // 2, y0)], fill=color)


def _strokes(dice: random.Random, settings: Mapping[str, int], digit: int) -> Callable[[ImageDraw], None]:
    """Return strokes of a digit in seven segments, at a random size and place."""
    size = settings["size"]
    unit = dice.randint(size // 4, size * 2 // 5)
    x, y = dice.randint(2, size - unit - 3), dice.randint(2, max(2, size - 2 * unit - 3))
    line = max(2, size // 14)

    def draw(on: ImageDraw) -> None:
        for stroke in SEGMENTS[digit]:
            x0, y0, x1, y1 = (end * unit for end in STROKES[stroke])
            on.line((x + x0, y + y0, x + x1, y + y1), fill=INK, width=line)

    return draw


def _drawn(settings: Mapping[str, int], draw: Callable[[ImageDraw], None]) -> bytes:
    """Return a PNG file of the drawn strokes; the same strokes give the same bytes."""
    from PIL import Image, ImageDraw  # imported only for pictures

    picture = Image.new("RGB", (settings["size"], settings["size"]), PAPER)
    draw(ImageDraw.Draw(picture))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
