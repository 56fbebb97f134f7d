"""Faults that code of others has: exceptions of all sorts, and every fifth call that has one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

EXCEPTIONS: tuple[BaseException, ...] = (
    OSError("no such server"),
    ConnectionResetError("the server is gone"),
    TimeoutError("no reply"),
    BrokenPipeError(),
    ValueError("surrogate \ud800"),
    KeyError("state"),
    MemoryError(),
    RecursionError(),
    StopIteration(),
    StopAsyncIteration(),
    GeneratorExit(),
    SystemExit(3),
    KeyboardInterrupt(),
    AssertionError("x" * 100_000),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
)


class EveryFifth:
    """Gives every fifth call one of some faults, in turn."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self._kinds = kinds
        self._calls = itertools.count()
        self.given = 0

    def next(self) -> tuple[Any, bool]:
        """Return (the fault, whether there is one)."""
        if next(self._calls) % 5:
            return None, False
        self.given += 1
        return self._kinds[(self.given - 1) % len(self._kinds)], True
