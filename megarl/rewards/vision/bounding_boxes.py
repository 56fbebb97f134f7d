"""Boxes and points: read from an answer, converted to the ground truth's coordinates, compared, matched.

A box is (x1, y1, x2, y2) with x1 < x2 and y1 < y2, x to the right and y down. Python only: answers have few boxes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rewards.answer.grammar import after_thinking, extract

Numbers = tuple[float, ...]
Box = tuple[float, float, float, float]

MAX_SHAPES = 100
"""Maximum boxes of an answer or ground truth; matching takes O(n³)."""
MAX_TEXT = 20_000
SCALES: dict[str, float | None] = {"pixels": None, "0-1": 1.0, "0-100": 100.0, "0-1000": 1000.0}
"""Coordinate system -> its largest coordinate; None is the image's size in pixels."""

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.%])"
_BAD_NUMBER = re.compile(r"[+-]?\s*\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_GROUP = re.compile(r"[\[(]([^\[\](){}]*)[\])]")
_UNIT = re.compile(r"(?<=[\d.])\s*(?:px|pixels?)\b", re.IGNORECASE)
_LIST = re.compile(rf"\s*{_NUMBER}(?:\s*,\s*{_NUMBER}|\s+{_NUMBER})*\s*,?\s*")
_MOLMO = re.compile(r"<point\b[^<>]*?\bx\s*=\s*\"([^\"]*)\"[^<>]*?\by\s*=\s*\"([^\"]*)\"[^<>]*>")
_MANY_MOLMO = re.compile(r"<points?\b[^<>]*?\bx1\s*=")
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_MARKED = re.compile(r"\\(?:boxed|fbox)|<answer>|####", re.IGNORECASE)
_DOUBT = re.compile(r"\b(?:or|not|either)\b|n't\b|或|不是|不在", re.IGNORECASE)
_KEYS = {4: ("bbox_2d", "bbox", "box"), 2: ("point_2d", "point")}
_CORNERS = {4: ("x1", "y1", "x2", "y2"), 2: ("x", "y")}
_SIGNS = str.maketrans("（），＝：；", "(),=:;")
_HAN_NAMES = {"横": "x", "纵": "y"}
_NAMED = re.compile(rf"(?:\b([xy][12]?)\s*(?:=|:|\bis\b)|([横纵])坐标(?:[是为:=])?)\s*({_NUMBER})")
_CALLED = re.compile(
    r"(?:pyautogui\.)?(?:(?:left_|double_?)?click|tap|moveTo)\s*\((?P<call>[^()]*)\)|<(?P<name>click|tap)>(?P<tag>[^<>]*)</(?P=name)>",
    re.IGNORECASE,
)
"""A point in the form of GUI agents: ``click(x=60, y=70)``."""
_LABEL = re.compile(
    r"(?:(?:the|its)\s+)?(?:bounding\s+box|bbox|box|coordinates?|point|position|location)(?:\s+(?:is|are))?\s*[:=]?\s+",
    re.IGNORECASE,
)
_AROUND_NAMED = re.compile(
    r"(?:(?:the\s+)?(?:point|center|centre|target|object|location|position|it)\s+(?:is|lies)\s+|点?在)?"
    r"(?:at\s+)?(?:coordinates\s+)?[(\[{]?\s*\0(?:\s*(?:[,;]|\band\b|和)?\s*\0)+\s*[)\]}]?",
    re.IGNORECASE,
)
"""Text around named coordinates; each coordinate is replaced by ``\\0``."""


def answer_text(response: str) -> str:
    """Return the answer's text with coordinates: as in mathematics, but with all lines of an ``<answer>`` tag. Without
    box or tag it may also be the last code block, or a response that is JSON."""
    text = after_thinking(response).strip()
    if text.endswith("</answer>") and (tag := text[:-9].rpartition("<answer>"))[1] and not _MARKED.search(tag[2]):
        text = tag[2].strip()
    if not _MARKED.search(text):
        blocks = _FENCE.findall(text)
        if blocks:
            return str(blocks[-1]).strip()
        if text[:1] in ("[", "{") or re.match(r"<(?:points?|box)\b", text):
            return text
    return extract(text)


def shapes(value: Any, size: int) -> list[Numbers] | None:
    """Return every box (``size`` 4) or point (2) of a value: numbers, lists of them, ``{"bbox_2d": …}``, or text with
    them.

    None if a part is no such shape: wrong count, a non-finite number, a sentence with "or" or "not".
    """
    try:
        found = _of_text(value, size) if isinstance(value, str) else _of_value(value, size)
    except (ValueError, OverflowError, TypeError, RecursionError):
        return None
    return found if len(found) <= MAX_SHAPES else None


def _of_value(value: Any, size: int) -> list[Numbers]:
    """Return the shapes of a parsed value. Raises ValueError or TypeError if it has none."""
    if isinstance(value, Mapping):
        filled = {key: item for key, item in value.items() if item is not None}  # parquet adds other rows' keys
        keys = [key for key in _KEYS[size] if key in filled]
        if not keys and all(corner in filled for corner in _CORNERS[size]):
            return [_numbers([filled[corner] for corner in _CORNERS[size]], size)]
        if len(keys) != 1:
            raise ValueError(f"no one of {_KEYS[size]}")
        return _of_value(filled[keys[0]], size)
    items = list(value)
    if len(items) == size and not any(isinstance(item, (Mapping, Sequence)) for item in items):
        return [_numbers(items, size)]
    if size == 4 and len(items) == 2 and all(isinstance(item, Sequence) and len(item) == 2 for item in items):
        return [_numbers([*items[0], *items[1]], size)]  # [[x1, y1], [x2, y2]]
    if any(isinstance(item, str) for item in items):
        raise ValueError("text among shapes")
    return [shape for item in items for shape in _of_value(item, size)]


def _numbers(items: Sequence[Any], size: int) -> Numbers:
    if len(items) != size or any(isinstance(item, (bool, str)) for item in items):
        raise ValueError(f"not {size} numbers")
    numbers = tuple(float(item) for item in items)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("not finite")
    return numbers


def _of_text(text: str, size: int) -> list[Numbers]:
    """Return the shapes of a text. Raises ValueError for brackets that are no shape, and for "or" and "not"."""
    if len(text) > MAX_TEXT or _BAD_NUMBER.search(text):
        raise ValueError("too long, or with a number that is none")
    text = text.strip().rstrip(".;。").translate(_SIGNS).strip("$`* ")
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, (list, dict)):
        return _of_value(read, size)
    if size == 2 and re.search(r"<points?\s[^<>]*=", text):
        points = _MOLMO.findall(text)
        if _MANY_MOLMO.search(text) or not points:
            raise ValueError("points that are not each of x and y")
        return [_numbers([float(x), float(y)], 2) for x, y in points]
    text = _UNIT.sub("", text)
    if size == 2 and (called := _CALLED.fullmatch(text)):
        text = (called["call"] or called["tag"] or "").strip()
    if label := _LABEL.match(text):
        text = text[label.end() :]
    if named := _named(text, size):
        return [named]
    if _LIST.fullmatch(text):
        return [_numbers(_floats(text), size)]
    groups = list(_GROUP.finditer(text))
    outside = _GROUP.sub(" ", text)
    if _DOUBT.search(outside) or re.search(r"\d\s*,\s*\d", outside):
        raise ValueError("no single answer")
    inside = [group.group(1) for group in groups if re.search(r"\d", group.group(1))]  # ignores remarks in brackets
    if not all(map(_LIST.fullmatch, inside)):
        raise ValueError("brackets with more than numbers")
    listed = [_floats(text) for text in inside]
    if size == 4 and listed and all(len(numbers) == 2 for numbers in listed) and len(listed) % 2 == 0:
        listed = [[*first, *second] for first, second in zip(listed[::2], listed[1::2], strict=True)]  # (x1,y1),(x2,y2)
    return [_numbers(numbers, size) for numbers in listed]


def _named(text: str, size: int) -> Numbers | None:
    """Return coordinates named once each that make up the text: ``x=60, y=100``, ``(x1: 1, y1: 2, x2: 3, y2: 4)``."""
    names = [name or _HAN_NAMES[han] for name, han, _ in _NAMED.findall(text)]
    if sorted(names) != sorted(_CORNERS[size]) or not _AROUND_NAMED.fullmatch(_NAMED.sub("\0", text)):
        return None
    numbers = dict(zip(names, (float(number) for *_, number in _NAMED.findall(text)), strict=True))
    return _numbers([numbers[corner] for corner in _CORNERS[size]], size)


def _floats(text: str) -> list[float]:
    return [float(number) for number in re.findall(_NUMBER, text)]


def rescaled(numbers: Numbers, source: str, target: str, width: float | None, height: float | None) -> Numbers:
    """Convert coordinates from scale ``source`` to ``target`` (both in SCALES). Raises ValueError if that needs a size
    that is missing."""
    if source == target:
        return numbers
    if "pixels" in (source, target) and (width is None or height is None):
        raise ValueError(
            f"coordinates {source} against {target} need extra_info.width and height, the image's size in pixels"
        )
    sizes = (width or 1.0, height or 1.0)
    factors = [(SCALES[target] or size) / (SCALES[source] or size) for size in sizes]
    return tuple(number * factors[i % 2] for i, number in enumerate(numbers))


def is_box(numbers: Numbers) -> bool:
    """Return True if the corners are in order and the box has an area."""
    return len(numbers) == 4 and numbers[0] < numbers[2] and numbers[1] < numbers[3] and math.isfinite(_area(numbers))


def _area(box: Numbers) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def iou(first: Numbers, second: Numbers) -> float:
    """Return intersection over union, in [0, 1]; 0 if either is not a box (corners swapped, no area)."""
    if not is_box(first) or not is_box(second):
        return 0.0
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    common = width * height
    union = _area(first) + _area(second) - common
    return min(1.0, common / union) if union > 0 and math.isfinite(union) else 0.0


def best_assignment(weights: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return min(rows, columns) pairs (row, column) with the largest sum of weights, each row and column at most once.

    The Hungarian method with potentials, O(rows² · columns); exact.
    """
    rows, columns = len(weights), len(weights[0]) if weights else 0
    if rows > columns:
        return [(row, column) for column, row in best_assignment(list(zip(*weights, strict=True)))]
    of_row, of_column = [0.0] * (rows + 1), [0.0] * (columns + 1)
    row_at = [0] * (columns + 1)  # row of each column, both counted from 1; 0: free
    for row in range(1, rows + 1):
        row_at[0], at = row, 0
        least, before, seen = [math.inf] * (columns + 1), [0] * (columns + 1), [False] * (columns + 1)
        while row_at[at]:
            seen[at] = True
            here, step, follows = row_at[at], math.inf, 0
            for column in range(1, columns + 1):
                if not seen[column]:
                    cost = -weights[here - 1][column - 1] - of_row[here] - of_column[column]
                    if cost < least[column]:
                        least[column], before[column] = cost, at
                    if least[column] < step:
                        step, follows = least[column], column
            for column in range(columns + 1):
                if seen[column]:
                    of_row[row_at[column]] += step
                    of_column[column] -= step
                else:
                    least[column] -= step
            at = follows
        while at:
            row_at[at], at = row_at[before[at]], before[at]
    return sorted((row_at[column] - 1, column - 1) for column in range(1, columns + 1) if row_at[column])
