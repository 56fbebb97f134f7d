"""Questions for megarl's own verifiers: school questions, guessing games, generated pictures.

All are made of reasoning-gym's sums. What is asked about a sum, in which words and with which options, follows from the
sum itself: one that is held out is held out in every form.
"""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.config.bounds import Bound
from megarl.core.errors import ConfigError
from megarl.tasks.generators.entries import Entries, Entry, gym_entries, slipped
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
PICTURE_OPTIONS = {
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
PICTURE_BOUNDS = {
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


THINGS = ("pens", "books", "cards", "shells")
LETTERS = "ABCD"
NAMES = "abcde"
"""Arguments of a program, one for each term of the sum."""
TESTS = 4
"""Tests of a program. Two that differ in a coefficient rarely agree on one, as no argument is 0."""


def math(seed: int, settings: Mapping[str, int]) -> Entries:
    r"""Sums, decimal sums and equations, with the answer in a box: ``Solve x + 5 = 12. Answer in \boxed{}.``"""
    _check_terms("math", settings, 100)
    whole = gym_entries("chain_sum", seed, settings)
    # One digit on each side of the point, whatever the options say: as hard as sums of two digits.
    places = {"min_digits": 1, "max_digits": 1, "min_decimal_places": 1, "max_decimal_places": 1}
    decimal = gym_entries("decimal_chain_sum", seed, settings, **places)
    for found in itertools.chain.from_iterable(zip(whole, whole, decimal, strict=True)):
        if found is None:
            yield None
            continue
        expression, answer = found["metadata"]["expression"], found["answer"]
        first, rest = expression.split(" ", 1)
        if "." in expression or _dice(expression).random() < 0.5:
            task, shown = f"What is {expression}?", answer
        else:
            task, shown = f"Solve x {rest.translate(str.maketrans('+-', '-+'))} = {first}.", f"x={answer}"
        response = rf"\boxed{{{shown}}}"
        yield Entry(rf"{task} Answer in \boxed{{}}.", answer, response, slipped(response), "math/sums")


def k12(seed: int, settings: Mapping[str, int]) -> Entries:
    """Half of them with options (``What is 12 + 5? A. 27 B. 17 C. 18 D. 16.``), half with a short answer (``17
    pens``)."""
    _check_terms("k12", settings, 100)
    for found in gym_entries("chain_sum", seed, settings):
        if found is None:
            yield None
            continue
        expression, answer = found["metadata"]["expression"], found["answer"]
        dice = _dice(expression)
        story = _story(expression, dice.choice(THINGS))
        yield _choice(expression, answer, dice) if story is None or dice.random() < 0.5 else _short(story, answer)


def _choice(expression: str, answer: str, dice: random.Random) -> Entry:
    """The options are near the answer, each with another last digit: which one a number is, is then seen in a token.
    The careless teacher's number is one of them."""
    right, wrong = int(answer), slipped(answer)
    near = [str(right + by) for by in (-3, -2, -1, 1, 2, 3)]
    others = {
        number[-1]: number for number in dice.sample(near, len(near)) if number[-1] not in (answer[-1], wrong[-1])
    }
    options = dice.sample([answer, wrong, *list(others.values())[:2]], len(LETTERS))
    listed = " ".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))

    def written(option: str) -> str:
        return f"{option}. Answer: {LETTERS[options.index(option)]}"

    return Entry(
        f"What is {expression}? {listed}. Write Answer: and the letter.",
        LETTERS[options.index(answer)],
        written(answer),
        written(wrong),
        "k12/sums",
        info={"type": "choice", "options": options},
    )


def _short(story: tuple[str, str], answer: str) -> Entry:
    question, thing = story
    right = f"{answer} {thing}"
    return Entry(question, answer, right, slipped(right), "k12/sums", info={"type": "short", "options": []})


def _story(expression: str, thing: str) -> tuple[str, str] | None:
    """A question about things that come and go, and their name; None for one who would give more than there is."""
    first, *rest = expression.split()
    left, told = int(first), f"Ann has {first} {thing}."
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        left += int(sign + number)
        told += f" She gets {number}." if sign == "+" else f" She gives {number} away."
        if left < 0:
            return None
    return f"{told} How many {thing} has she now?", thing


def code(seed: int, settings: Mapping[str, int]) -> Entries:
    """Tasks to write a described function in Python: ``return 12 times a minus 5 times b``. Tested by calls or by
    assertions."""
    _check_terms("code", settings, len(NAMES))
    for found in gym_entries("chain_sum", seed, settings):
        if found is None:
            yield None
            continue
        expression = found["metadata"]["expression"]
        dice = _dice(expression)
        first, *rest = expression.split()
        coefficients = [int(first), *(int(sign + number) for sign, number in zip(rest[::2], rest[1::2], strict=True))]
        names = NAMES[: len(coefficients)]
        head = f"def f({', '.join(names)}):\n    return "
        terms = dict(zip(names, [first, *rest[1::2]], strict=True))
        said = _joined(
            [f"{number} times {name}" for name, number in terms.items()],
            ["plus" if sign == "+" else "minus" for sign in rest[::2]],
        )
        turned = dice.random() < 0.5  # either is right
        wrong = terms | {names[-1]: slipped(rest[-1])}
        right, wrong_too = (
            _joined([f"{n} * {v}" if turned else f"{v} * {n}" for n, v in t.items()], rest[::2]) for t in (terms, wrong)
        )
        yield Entry(
            f"{head}{said}\nWrite it in Python.",
            _tests(coefficients, dice),
            head + right,
            head + wrong_too,
            "code/sums",
            "code",
        )


def _joined(terms: Sequence[str], signs: Sequence[str]) -> str:
    return terms[0] + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))


def _tests(coefficients: Sequence[int], dice: random.Random) -> str:
    """JSON of calls and what they return (as APPS has them), or of assertions (as MBPP)."""
    inputs = [[dice.choice((-1, 1)) * dice.randint(1, 99) for _ in coefficients] for _ in range(TESTS)]
    outputs = [sum(c * value for c, value in zip(coefficients, given, strict=True)) for given in inputs]
    if dice.random() < 0.5:
        return json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": "f"})
    calls = [f"f({', '.join(map(str, given))})" for given in inputs]
    return json.dumps({"test_list": [f"assert {call} == {value}" for call, value in zip(calls, outputs, strict=True)]})


def _dice(expression: str) -> random.Random:
    """Return a generator seeded by the sum, the same in every process."""
    return random.Random(expression)


def _check_terms(name: str, settings: Mapping[str, int], most: int) -> None:
    if settings["min_terms"] < 2 or settings["max_terms"] > most:
        raise ConfigError(
            f"taskset.options: {name} takes sums of 2 to {most} terms, got {settings['min_terms']} to "
            f"{settings['max_terms']}"
        )


GAMES = 10_000
OPTIONS = {"max_number": 9, "numbers": 7, "tries": 3}
"""Options and their defaults: the largest number, how many numbers a question names, the most guesses."""


def guess(seed: int, settings: Mapping[str, int]) -> Entries:
    """Ranges with a hidden number: ``Game 7. Guess 2 to 8: higher or lower?`` A teacher guesses any of the numbers.

    Raises ConfigError where fewer than two numbers are named, or more than there are.
    """
    most, numbers, tries = settings["max_number"], settings["numbers"], settings["tries"]
    if not 2 <= numbers <= most + 1 or tries < 1:
        raise ConfigError(
            f"taskset.options: guess takes 2 to max_number + 1 numbers and at least 1 of tries, got {dict(settings)}"
        )
    dice = random.Random(seed)
    while True:
        low = dice.randint(0, most + 1 - numbers)
        high = low + numbers - 1
        question = f"Game {dice.randrange(GAMES)}. Guess {low} to {high}: higher or lower?"
        first, second = dice.sample(range(low, high + 1), 2)
        hidden = random.Random(question).randint(low, high)
        yield Entry(question, str(hidden), str(first), str(second), "guess", "game", {"tries": tries})
