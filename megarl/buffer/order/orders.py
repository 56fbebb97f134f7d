"""Orders of the tasks of one source: which of 0 .. size-1 a step takes, a function of its number and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.buffer.order.draws import CURRICULUM, PRIORITY, extra_numbers, numbers_from


@dataclass(frozen=True)
class Draw:
    """Part of a step's tasks that one source gives."""

    step: int
    """Steps done before this one."""
    start: int
    """Tasks that the source has given in all steps before."""
    count: int
    extra: int
    """0 for the step's first rollout, 1, 2, … for those that dynamic sampling adds."""
    seed: int
    stream: tuple[int, ...] = ()
    """Tells sources apart."""


def shuffled(size: int, draw: Draw) -> list[int]:
    """Every epoch is a new permutation."""
    first = numbers_from(size, draw.start, draw.count, draw.seed, *draw.stream)
    if not draw.extra:
        return first
    return extra_numbers(size, first, draw.step, draw.extra, draw.count, draw.seed, *draw.stream)


def in_file_order(size: int, draw: Draw) -> list[int]:
    """Every epoch is the file from its first row to its last."""
    return [(draw.start + draw.extra * draw.count + i) % size for i in range(draw.count)]


def curriculum(by_difficulty: Sequence[int], steps: int, draw: Draw) -> list[int]:
    """A random choice of the easiest; as ``shuffled`` once ``steps`` steps are done.

    Args:
        by_difficulty: All numbers, the easiest first.
        steps: Step s, counted from 1, takes from the easiest s / ``steps``, at least as many as it takes.
    """
    size = len(by_difficulty)
    if draw.step >= steps:
        return shuffled(size, draw)
    reached = max(draw.count, -(-size * (draw.step + 1) // steps))
    random = np.random.default_rng([draw.seed, draw.step, CURRICULUM, *draw.stream])
    return _ranked([*random.permutation(by_difficulty[:reached]).tolist(), *by_difficulty[reached:]], draw)


def prioritized(weights: np.ndarray, draw: Draw) -> list[int]:
    """A random choice in proportion to ``weights`` (float64 [size], above 0), one after the other, none twice."""
    random = np.random.default_rng([draw.seed, draw.step, PRIORITY, *draw.stream])
    arrivals = random.standard_exponential(len(weights)) / weights
    return _ranked(np.argsort(arrivals, kind="stable").tolist(), draw)


def _ranked(ranking: Sequence[int], draw: Draw) -> list[int]:
    """The part of a step's ranking that a rollout takes; the extra ones go on behind it."""
    first = draw.extra * draw.count
    return [ranking[i % len(ranking)] for i in range(first, first + draw.count)]
