"""Comparison of a program's output or return value with the expected one. Pure functions on untrusted text.

No set or dict is built from the program's data, and none of its methods is called to compare it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Float tolerances, as ``numpy.allclose`` in APPS' checker."""
INTEGER_ABSOLUTE = 1e-6
"""Tolerance of a float if an integer is expected: 1.9999999999 equals 2; 333333.3333 does not equal 333333 (in APPS it
does)."""
INTEGER = re.compile(r"[+-]?\d+\Z", re.ASCII)
FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line without empty lines, and each line word by word, so that white space does not matter."""
    if printed.strip() == expected.strip():
        return True
    ours, theirs = ([line.split() for line in text.splitlines() if line.strip()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if INTEGER.match(expected):
        # integers are exact; a program may print one as a float
        return not INTEGER.match(printed) and bool(FLOAT.match(printed)) and _near(float(printed), float(expected))
    if FLOAT.match(expected) and FLOAT.match(printed):
        return _close(float(printed), float(expected))
    return False


def _near(found: float, expected: float) -> bool:
    return math.isfinite(found) and abs(expected) < 2**53 and abs(found - expected) <= INTEGER_ABSOLUTE


def _close(found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= ABSOLUTE + RELATIVE * abs(expected)


def same_value(returned: str, expected: Any) -> bool:
    """Compare ``returned``, JSON of ``sandbox.inside.values``, with ``expected``, plain JSON (tuples are lists, keys
    strings).

    A list of one may also replace its element, as in APPS' rows.
    """
    try:
        data = json.loads(returned)
        return _same(data, expected) or (isinstance(expected, list) and len(expected) == 1 and _same(data, expected[0]))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        return False  # not written by `values`


def _same(data: Any, expected: Any) -> bool:
    if isinstance(data, dict):
        return _same_tagged(data["t"], data["v"], expected)
    if isinstance(data, bool) or isinstance(expected, bool) or data is None or expected is None:
        return data is expected
    if isinstance(data, str) or isinstance(expected, str):
        return isinstance(data, str) and isinstance(expected, str) and data == expected
    if isinstance(data, list):
        return isinstance(expected, list) and len(data) == len(expected) and all(map(_same, data, expected))
    if isinstance(data, int) and isinstance(expected, int):
        return data == expected
    if isinstance(data, (int, float)) and isinstance(expected, (int, float)):
        return _near(data, expected) if isinstance(expected, int) else _close(float(data), expected)
    return False


def _same_tagged(kind: str, content: Any, expected: Any) -> bool:
    if kind in ("tuple", "iterator", "deque"):
        return _same(content, expected)
    if kind == "int":
        return isinstance(expected, int) and not isinstance(expected, bool) and int(content, 16) == expected
    if kind == "float":  # inf and nan, spelled as in Python
        return isinstance(expected, float) and content == repr(expected)
    if kind == "range":
        return (
            isinstance(expected, list) and len(range(*content)) == len(expected) and list(range(*content)) == expected
        )
    if kind == "dict":
        return isinstance(expected, dict) and len(content) == len(expected) and _same_items(content, dict(expected))
    return False


def _same_items(content: list[Any], left: dict[str, Any]) -> bool:
    """Compare the items of a dict. ``left`` shrinks, so that a repeated key matches once. JSON has string keys: 1 is
    "1"."""
    for key, value in content:
        name = key if isinstance(key, str) else json.dumps(key)
        if name not in left or not _same(value, left.pop(name)):
            return False
    return not left
