"""Reductions over the tokens of a step, of which a rank may hold some sequences only.

Each sequence gives partial results, which have the same bits in whatever company it is. ``together`` brings those of
all sequences to every rank, in the step's order, and they are reduced in that one order. So a result depends on neither
the grid nor the number of threads. Elementwise functions are taken of some sequences at once: torch computes the rest
of a vector with the vector's own code (tested).
Shape legend: N sequences of a step, n of them held by this rank, T their positions, M of them that count; g sequences
with m such tokens are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megarl.learn.algorithms.terms.token_parts import PART

Together = Callable[[torch.Tensor], torch.Tensor]
"""[n, ...] of the sequences that this rank holds -> [N, ...] of all sequences of the step, in the step's order. Every
rank calls it alike, in the same order, also with n = 0."""
Each = Callable[..., torch.Tensor]
"""Elementwise function of values [m]."""
DIGIT_BITS = 4
"""Bits of a float32 that one round of ``Tokens.quantile`` finds: a sequence gives 16 counts."""


def alone(partial: torch.Tensor) -> torch.Tensor:
    """Return ``partial``: ``Together`` of a rank that holds all sequences."""
    return partial


class Totals(NamedTuple):
    """Numbers of a step in few. NaN among them is NaN in all but ``number``."""

    number: int
    sum: float
    max: float
    min: float

    @property
    def mean(self) -> float:
        """Mean; 0 of no numbers."""
        return self.sum / self.number if self.number else 0.0

    def spread(self, name: str) -> dict[str, float]:
        """``name/mean``, ``name/max``, ``name/min``; {} of no numbers."""
        if not self.number:
            return {}
        return {f"{name}/mean": self.mean, f"{name}/max": self.max, f"{name}/min": self.min}


def totals_of(values: torch.Tensor) -> Totals:
    """Totals of numbers that every rank has."""
    partial = _partials(values.double().numpy(), np.array([len(values)]))
    return _reduced(torch.from_numpy(partial))


@dataclass(frozen=True)
class Tokens:
    """Tokens of a step that are reduced: those that this rank holds, and how results of all are put together."""

    mask: torch.Tensor
    """bool [T]; M positions are True. What other positions hold does not matter."""
    lengths: torch.Tensor
    """int64 [n], of the held sequences: T in sum."""
    together: Together = alone

    def totals(self, each: Each, *values: torch.Tensor) -> Totals:
        """Totals of ``each`` of the kept ``values`` [T], over all sequences of the step, in float64."""
        return self.totals_of_each(lambda *kept: (each(*kept),), *values)[0]

    def totals_of_each(self, functions: Callable[..., Sequence[torch.Tensor]], *values: torch.Tensor) -> list[Totals]:
        """Totals of each result of ``functions``, which share one pass over the tokens."""
        number_of_results = len(functions(*(x[:0] for x in values)))
        partial = [np.empty((0, number_of_results, 4))]
        for number, kept in self.groups(*values):
            partial.append(np.stack([_partials(x.double().numpy(), number) for x in functions(*kept)], axis=1))
        whole = self.together(torch.from_numpy(np.concatenate(partial)))
        return [_reduced(of_one.contiguous()) for of_one in whole.unbind(1)]

    def variance(self, mean: float, each: Each, *values: torch.Tensor) -> float:
        """Unbiased variance of ``each`` of the kept values, whose ``mean`` is known; NaN of fewer than two."""
        squares = self.totals(lambda *kept: (each(*kept).double() - mean).square(), *values)
        return squares.sum / (squares.number - 1) if squares.number > 1 else math.nan

    def quantile(self, at: float, each: Each, *values: torch.Tensor) -> float:
        """Quantile ``at`` of ``each``, float32 and not negative, over all sequences: the next higher of its values.

        Exact, although no rank has all values: the bits of numbers that are not negative have their order, and each
        round finds the next bits by counts of the sequences. NaN counts as the largest. Raises AssertionError for no
        token.
        """
        held = [(each(*kept).abs().numpy().view(np.int32), number) for number, kept in self.groups(*values)]
        bins, found, place = 2**DIGIT_BITS, 0, -1
        for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
            counts = [_histograms(bits >> shift & bins - 1, number, bins) for bits, number in held]
            partial = np.concatenate([np.empty((0, bins), np.int64), *counts])
            ends = self.together(torch.from_numpy(partial)).sum(0).cumsum(0)
            if place < 0:
                assert ends[-1] > 0, "a quantile of no token"
                place = int(np.ceil(at * (int(ends[-1]) - 1)))
            digit = int(torch.searchsorted(ends, place, right=True))
            place -= int(ends[digit - 1]) if digit else 0
            found |= digit << shift
            for i, count in enumerate(counts):
                bits, _ = held[i]
                held[i] = bits[bits >> shift & bins - 1 == digit], count[:, digit]
        return float(np.array(found, np.int32).view(np.float32))

    def groups(self, *values: torch.Tensor) -> Iterator[tuple[np.ndarray, tuple[torch.Tensor, ...]]]:
        """(number of kept tokens [g], kept values [m] of each of ``values`` [T]) of some held sequences at a time: of
        those that begin within the same ``PART`` positions."""
        begins = self.lengths.cumsum(0) - self.lengths
        sizes = torch.unique_consecutive(begins // PART, return_counts=True)[1].tolist()
        lengths = self.lengths.split(sizes)
        positions = [int(of_group.sum()) for of_group in lengths]
        split = (x.split(positions) for x in (self.mask, *values))
        for of_group, mask, *own in zip(lengths, *split, strict=True):
            places = np.flatnonzero(mask.numpy())
            number = np.diff(np.searchsorted(places, of_group.cumsum(0).numpy()), prepend=0)
            index = torch.from_numpy(places)  # found once: to take each of ``values`` by the mask is 4 times as slow
            yield number, tuple(x.index_select(0, index) for x in own)


def _partials(x: np.ndarray, number: np.ndarray) -> np.ndarray:
    """float64 [g, 4]: fields of ``Totals`` of each sequence, of values [m]. numpy's sum is by one thread."""
    sums = _by_sequence(np.add, x, number, 0.0)
    extremes = (_by_sequence(np.maximum, x, number, -np.inf), _by_sequence(np.minimum, x, number, np.inf))
    return np.stack([number.astype(np.float64), sums, *extremes], axis=1)


def _reduced(partial: torch.Tensor) -> Totals:
    """Totals of all sequences, of their partial results [N, 4]."""
    with np.errstate(all="ignore"):
        number, total, largest, smallest = partial.numpy().T
        # 0 is added so that -0.0 is 0.0, whichever of both comes first.
        highest, lowest = largest.max(initial=-np.inf) + 0.0, smallest.min(initial=np.inf) + 0.0
        return Totals(int(number.sum()), float(total.sum()), float(highest), float(lowest))


def _by_sequence(operation: np.ufunc, x: np.ndarray, number: np.ndarray, of_none: float) -> np.ndarray:
    """[g]: the reduction of each sequence's values among [m]; ``of_none`` where it has none."""
    result, there = np.full(len(number), of_none, x.dtype), number > 0
    if there.any():
        with np.errstate(all="ignore"):  # NaN and infinities go through
            result[there] = operation.reduceat(x, (number.cumsum() - number)[there])
    return result


def _histograms(digits: np.ndarray, number: np.ndarray, bins: int) -> np.ndarray:
    """int64 [g, bins]: how many of a sequence's digits [m] are each of 0 .. bins-1."""
    row = np.repeat(np.arange(len(number)) * bins, number)
    return np.bincount(row + digits, minlength=len(number) * bins).reshape(len(number), bins)
