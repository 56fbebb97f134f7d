"""Values of Python as JSON, so that they can be compared where the program that made them cannot reach.

None, booleans, strings, lists, small integers and finite floats are themselves; all else is ``{"t": type, "v": ...}``.
Never pickle: the reader does not trust the writer. A subclass is written as its base type, so a string with its own
``__eq__`` arrives as a plain string.
"""

from __future__ import annotations

import math
import sys
from _collections import deque  # type: ignore[import-not-found]  # collections itself takes long to import

# What ``json`` is made of: that would import ``re``, which takes longer than Python's own start.
from _json import encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MAX_ITEMS = 1_000_000
"""Limit of an iterator that has to be read out."""
SMALL = 2**63


def encode(value: Any, opaque: Callable[[Any], Any] | None = None) -> Any:
    """``value`` as something that ``json`` writes. What has no form here goes to ``opaque``; without one, TypeError."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -SMALL < number < SMALL else {"t": "int", "v": hex(number)}
    if isinstance(value, float):
        real = float(value)
        return real if math.isfinite(real) else {"t": "float", "v": repr(real)}
    if isinstance(value, list):
        return [encode(item, opaque) for item in value]
    if isinstance(value, complex):
        return {"t": "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, dict):
        return {"t": "dict", "v": [[encode(key, opaque), encode(item, opaque)] for key, item in value.items()]}
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {"t": name, "v": [encode(item, opaque) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"t": type(value).__name__ if type(value) is bytearray else "bytes", "v": value.hex()}
    if isinstance(value, range):
        return {"t": "range", "v": [value.start, value.stop, value.step]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), opaque)
    for name, (module, kind, arguments, _) in BY_ARGUMENTS.items():
        if type(value) is getattr(sys.modules.get(module), kind, None):  # who has such a value has imported its module
            return {"t": name, "v": arguments(value)}
    if hasattr(type(value), "__next__") and hasattr(type(value), "__iter__"):
        return {"t": "iterator", "v": [encode(item, opaque) for item in _bounded(value)]}
    if opaque is not None:
        return opaque(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot leave the sandbox")


def decode(data: Any, special: Callable[[str, Any], Any] | None = None) -> Any:
    """The value. Types that are unknown here go to ``special(type, v)``. Raises ValueError, TypeError or KeyError for
    anything else."""
    if isinstance(data, list):
        return [decode(item, special) for item in data]
    if not isinstance(data, dict):
        return data
    kind, content = data["t"], data["v"]
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "dict":
        return {decode(key, special): decode(item, special) for key, item in content}
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(item, special) for item in content)
    if kind == "iterator":
        return iter([decode(item, special) for item in content])
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "bytearray":
        return bytearray.fromhex(content)
    if kind == "range":
        return range(*content)
    if kind in BY_ARGUMENTS:
        module, name, _, build = BY_ARGUMENTS[kind]
        return build(getattr(__import__(module), name), content)
    if special is not None:
        return special(kind, content)
    raise ValueError(f"unknown type {kind!r}")


class _Format:
    """Settings that ``json.loads`` has by default."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def loads(text: str) -> Any:
    """``json.loads`` of what ``json.dumps`` wrote. Raises ValueError or StopIteration for anything else."""
    value, end = make_scanner(_Format)(text, 0)  # type: ignore[arg-type]
    if end != len(text):
        raise ValueError("text behind the value")
    return value


def dumps(value: Any) -> str:
    """``json.dumps``."""
    return "".join(
        make_encoder(None, _no_json, encode_basestring_ascii, None, ": ", ", ", False, False, True)(value, 0)
    )


def _no_json(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not JSON")


def _bounded(values: Iterator[Any]) -> Iterator[Any]:
    for count, item in enumerate(values):
        if count >= MAX_ITEMS:
            raise ValueError(f"an iterator of more than {MAX_ITEMS} items")
        yield item


SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
BY_ARGUMENTS: dict[str, tuple[str, str, Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "fraction": ("fractions", "Fraction", str, lambda kind, text: kind(text)),
    "decimal": ("decimal", "Decimal", str, lambda kind, text: kind(text)),
    "datetime": ("datetime", "datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "date": ("datetime", "date", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "timedelta": (
        "datetime", "timedelta", lambda value: [value.days, value.seconds, value.microseconds],
        lambda kind, parts: kind(*parts),
    ),
}  # fmt: skip
"""Module and name of the class, its arguments, from those to the value. Imported only when such a value comes: that
takes milliseconds."""
