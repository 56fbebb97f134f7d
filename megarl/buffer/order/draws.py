"""Order of tasks and rows, as pure functions of seed and step, so that a resumed run continues it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from megarl.config import Config

EXTRA, EXPERT, ROLLBACK, EVALUATION, SOURCE, CURRICULUM, PRIORITY, REPLAY = 1, 2, 3, 4, 5, 6, 7, 8
"""Random streams besides the stream of tasks; separate streams make choices independent of each other."""

Demonstration = tuple[np.ndarray, np.ndarray]
"""int32 [P], int32 [R]: the tokens of a prompt and of the answer to imitate."""


class ExpertRow(NamedTuple):
    """A demonstration drawn by a step in addition to sampled responses."""

    prompt: np.ndarray
    """int32 [P]"""
    response: np.ndarray
    """int32 [R]"""
    teacher_logp: np.ndarray | None = None
    """float32 [R]; None if the loss does not read it."""
    images: tuple[bytes, ...] = ()
    """Files of the prompt's images; the prompt has a placeholder for each of their vectors."""
    teacher: str | None = None
    """Name of its teacher (``teachers.NAME``); None without one."""


def data_seed(seed: int, rollbacks: int) -> int:
    """Return the seed of a step's tasks and sampling: ``trainer.seed``, or a derived seed after rollbacks.

    So the step that failed is not repeated with the same data.
    """
    return drawn_seed(seed, rollbacks, ROLLBACK) >> 1 if rollbacks else seed


def drawn_seed(*numbers: int) -> int:
    """Return a seed derived from ``numbers``."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def evaluation_sampling(config: Config, step: int) -> dict[str, Any]:
    """Return the sampling parameters of an evaluation: a function of settings and step, so a resumed run samples the
    same."""
    evaluation = config.evaluation
    sampling = {"temperature": evaluation.temperature, "max_tokens": config.rollout.max_response_tokens}
    if evaluation.temperature == 0.0:
        return sampling
    seed = drawn_seed(config.trainer.seed, step, EVALUATION)
    return sampling | {"seed": seed, "top_p": evaluation.top_p, "top_k": evaluation.top_k}


def tasks_of_step(task_ids: Sequence[str], step: int, count: int, seed: int) -> list[str]:
    """Return the ``count`` tasks of a step: every epoch is a new permutation of all tasks."""
    return [task_ids[i] for i in numbers_of_step(len(task_ids), step, count, seed)]


def numbers_of_step(size: int, step: int, count: int, seed: int, *stream: int) -> list[int]:
    """Return ``count`` of 0 .. ``size``-1 for a step, chosen as in :func:`tasks_of_step`."""
    return numbers_from(size, step * count, count, seed, *stream)


def numbers_from(size: int, start: int, count: int, seed: int, *stream: int) -> list[int]:
    """Return ``count`` of 0 .. ``size``-1 from position ``start`` in the concatenated permutations of all epochs."""
    order: list[int] = []
    while len(order) < count:
        epoch, offset = divmod(start + len(order), size)
        permutation = np.random.default_rng([seed, epoch, *stream]).permutation(size)
        order += permutation[offset : offset + count - len(order)].tolist()
    return order


def extra_tasks(task_ids: Sequence[str], step: int, extra: int, count: int, seed: int) -> list[str]:
    """Return the ``count`` tasks of a step's extra rollout number ``extra`` (1, 2, …).

    Tasks new to the step come first, then all tasks again.
    """
    first = numbers_of_step(len(task_ids), step, count, seed)
    return [task_ids[i] for i in extra_numbers(len(task_ids), first, step, extra, count, seed)]


def extra_numbers(
    size: int, first: Collection[int], step: int, extra: int, count: int, seed: int, *stream: int
) -> list[int]:
    """Return ``count`` of 0 .. ``size``-1 for an extra rollout, as :func:`extra_tasks`; ``first``: the step's
    numbers."""
    permutation = np.random.default_rng([seed, step, EXTRA, *stream]).permutation(size).tolist()
    taken = set(first)
    order = [i for i in permutation if i not in taken] + [i for i in permutation if i in taken]
    return [order[i % size] for i in range((extra - 1) * count, extra * count)]


def data_cursor(num_tasks: int, step: int, count: int, seed: int) -> dict[str, int] | None:
    """Return the position in the order of training tasks at which a step begins; None without tasks."""
    if not num_tasks:
        return None
    epoch, offset = divmod(step * count, num_tasks)
    return {"seed": seed, "tasks": num_tasks, "epoch": epoch, "offset": offset}


def num_expert_rows(usual: int, ratio: float) -> int:
    """Return the number of expert rows that, with ``usual`` sampled rows, makes up ⌈ratio · rows⌉ of a step.

    Computed in exact decimals: 0.07 · 100 is 7, but above 7 in floats.
    """
    share = Fraction(str(ratio))
    return math.ceil(usual * share / (1 - share))


class ExpertRows:
    """The store's expert experiences in their order; a step's choice depends on seed and step alone."""

    def __init__(self, rows: Sequence[ExpertRow]) -> None:
        self._rows = rows

    def of_step(self, step: int, count: int, seed: int) -> list[ExpertRow]:
        """Return ``count`` rows for a step; over an epoch each row is drawn once."""
        return [self._rows[i] for i in numbers_of_step(len(self._rows), step, count, seed, EXPERT)]
