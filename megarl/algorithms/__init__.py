"""Algorithms by name. A new one is one file of pure functions and one row here."""

from __future__ import annotations

import difflib

from megarl.algorithms.groups import group_stats
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.sft import SFT
from megarl.algorithms.types import Algorithm, Loss, LossInput
from megarl.errors import ConfigError

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO,
    "sft": SFT,
}

__all__ = ["ALGORITHMS", "Algorithm", "Loss", "LossInput", "get", "group_stats"]


def get(name: str) -> Algorithm:
    """The algorithm called ``name``; ConfigError with the nearest known name otherwise."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    near = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"no algorithm {name!r}{hint} (known: {', '.join(sorted(ALGORITHMS))})")
