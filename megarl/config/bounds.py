"""Bounds of numbers. A setting has its bound in its type: ``clip_low: Coefficient``, ``Annotated[int, Bound(1, 101)]``.

``load.py`` checks values against them; the settings reference prints them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints


class Bound(NamedTuple):
    """``low`` <= value <= ``high``, for a finite value; ``above`` and ``below`` exclude the end itself."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    multiple: int = 1

    def admits(self, value: float) -> bool:
        if not math.isfinite(value) or (self.multiple > 1 and value % self.multiple):
            return False
        return (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        text = f"{'above' if self.above else 'at least'} {number_text(self.low)}"
        if self.high < math.inf:
            text += f" and {'below' if self.below else 'at most'} {number_text(self.high)}"
        return text + (f" and a multiple of {self.multiple}" if self.multiple > 1 else "")


@functools.cache
def annotations_of(cls: Any, bounds: bool = False) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, with their bounds if ``bounds``. Cached: evaluation is slow."""
    return get_type_hints(cls, include_extras=bounds)


def bound_of(annotation: Any) -> Bound | None:
    """Return the bound of a type, or of one alternative of a union; None without one."""
    parts = (annotation, *get_args(annotation))
    return next((item for part in parts for item in getattr(part, "__metadata__", ()) if isinstance(item, Bound)), None)


def number_text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


Count = Annotated[int, Bound(1)]
NonNegative = Annotated[int, Bound(0)]
Seed = Annotated[int, Bound(0, 2**31 - 1)]
Ranks = Annotated[int, Bound(1, 65536)]
Threads = Annotated[int, Bound(1, 1024)]
Coefficient = Annotated[float, Bound(0)]
Number = Annotated[float, Bound(-1e30, 1e30)]
Positive = Annotated[float, Bound(0, above=True)]
UnitInterval = Annotated[float, Bound(0, 1)]
RewardWeight = Annotated[float, Bound(-100, 100)]
Temperature = Annotated[float, Bound(0, 2)]  # vLLM's, and OpenAI's
Seconds = Annotated[float, Bound(0, 30 * 86400, above=True)]
