"""Orders of the tasks of one source: the choice from 0 .. size-1 as a function of step and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.buffer.order.draws import CURRICULUM, PRIORITY, extra_numbers, numbers_from


@dataclass(frozen=True)
class Draw:
    """The tasks that a step takes from one source."""

    step: int
    """Steps done before this one."""
    start: int
    """Tasks taken from the source by earlier steps."""
    count: int
    extra: int
    """0 for the step's first rollout; 1, 2, … for rollouts added by dynamic sampling."""
    seed: int
    stream: tuple[int, ...] = ()
    """Random stream of the source."""


def shuffled(size: int, draw: Draw) -> list[int]:
    """Take tasks from a new permutation in every epoch."""
    first = numbers_from(size, draw.start, draw.count, draw.seed, *draw.stream)
    if not draw.extra:
        return first
    return extra_numbers(size, first, draw.step, draw.extra, draw.count, draw.seed, *draw.stream)


def in_file_order(size: int, draw: Draw) -> list[int]:
    """Take tasks in file order in every epoch."""
    return [(draw.start + draw.extra * draw.count + i) % size for i in range(draw.count)]


def curriculum(by_difficulty: Sequence[int], steps: int, draw: Draw) -> list[int]:
    """Choose randomly from the easiest; as ``shuffled`` after ``steps`` steps.

    Args:
        by_difficulty: All numbers, the easiest first.
        steps: Step s, counted from 1, chooses from the easiest s / ``steps``, and from at least as many as it takes.
    """
    size = len(by_difficulty)
    if draw.step >= steps:
        return shuffled(size, draw)
    reached = max(draw.count, -(-size * (draw.step + 1) // steps))
    random = np.random.default_rng([draw.seed, draw.step, CURRICULUM, *draw.stream])
    return _ranked([*random.permutation(by_difficulty[:reached]).tolist(), *by_difficulty[reached:]], draw)


def prioritized(weights: np.ndarray, draw: Draw) -> list[int]:
    """Choose randomly in proportion to ``weights`` (float64 [size], above 0), without replacement."""
    random = np.random.default_rng([draw.seed, draw.step, PRIORITY, *draw.stream])
    arrivals = random.standard_exponential(len(weights)) / weights
    return _ranked(np.argsort(arrivals, kind="stable").tolist(), draw)


def _ranked(ranking: Sequence[int], draw: Draw) -> list[int]:
    """Return the part of a step's ranking for a rollout; extra rollouts continue after the first."""
    first = draw.extra * draw.count
    return [ranking[i % len(ranking)] for i in range(first, first + draw.count)]
