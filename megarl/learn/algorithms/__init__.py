"""Algorithms by name. A new one is pure functions and a row in the file of its kind; users can give their own file."""

from __future__ import annotations

import difflib
from typing import Any

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS, Job, Mode
from megarl.learn.algorithms import group_relative, pairs, supervised, token_returns
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput
from megarl.learn.algorithms.user import load, try_out

ALGORITHMS: dict[str, Algorithm[Any]] = {
    row.name: row for kind in (group_relative, token_returns, supervised, pairs) for row in kind.ROWS
}

__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "Loss", "LossInput", "StepInput", "get", "job_of", "try_out"]


def get(name: str) -> Algorithm:
    """Return the algorithm with this name, or of a Python file. Raises ConfigError with the nearest name."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name.endswith(".py"):
        return load(name)
    near = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no algorithm {name!r}{hint} (known: {', '.join(sorted(ALGORITHMS))}; or a Python file of your own, ending in "
        ".py)"
    )


def job_of(config: Config) -> Job:
    """Return the job of ``config``; only this function determines its mode. Raises ConfigError as ``get``."""
    mode: Mode = config.run.mode
    if mode != "bench" and get(config.algorithm.name).offline:
        mode = "offline"
    return JOBS[mode].numbered(config.run.number)
