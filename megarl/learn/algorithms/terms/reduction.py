"""Reductions over the tokens of a step, in parts so that temporary memory does not grow.

Every result has the same bits as if computed in one piece: parts are written into one tensor, which is reduced
afterwards. Shape legend: T positions of a step, M of them kept by a mask, N sequences.

Each sequence has partial results, whose bits do not depend on other sequences. ``together`` gathers them on every rank
in the step's order, and they are reduced in that order. So a result depends neither on the grid nor on the number of
threads. Elementwise functions process some sequences at a time: torch gives equal bits for any split of a vector
(tested).
Shape legend: N sequences of a step, n of them held by this rank, T their positions, M of them kept; g sequences with m
kept tokens are processed at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

PART = 2**16
"""Number of positions of a part."""


def parts(mask: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield (positions in [T], range in [M] of those that ``mask`` keeps)."""
    first = 0
    for start in range(0, mask.numel(), PART):
        number = int(torch.count_nonzero(mask[start : start + PART]))
        yield slice(start, start + PART), slice(first, first + number)
        first += number


def doubles(mask: torch.Tensor, each: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    """Return float64 [M]: ``each(*values)``, elementwise, over the ``values`` [T] that ``mask`` [T] keeps."""
    result = torch.empty(int(torch.count_nonzero(mask)), dtype=torch.float64, device=mask.device)
    for at, kept in parts(mask):
        result[kept] = each(*(x[at][mask[at]] for x in values))
    return result


def picked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``values[mask]``, [T] -> [M]."""
    result = values.new_empty(int(torch.count_nonzero(mask)))
    for at, kept in parts(mask):
        result[kept] = values[at][mask[at]]
    return result


def spread_out(kept: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scatter kept tokens [M] to [T], with 0 elsewhere."""
    result = torch.zeros(mask.shape, dtype=kept.dtype, device=kept.device)
    for at, place in parts(mask):
        result[at][mask[at]] = kept[place]
    return result


def repeated(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return [T]: value i of [N] repeated ``lengths[i]`` times."""
    result = values.new_empty(int(lengths.sum()))
    for value, part in zip(values, result.split(lengths.tolist()), strict=True):
        part.copy_(value)
    return result


def counts(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return int64 [N]: number of positions of each sequence that ``mask`` [T] keeps."""
    ends = lengths.cumsum(0).to(mask.device)
    before = ends.new_zeros(())
    up_to = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=mask.device)
    for start in range(0, mask.numel(), PART):
        running = mask[start : start + PART].cumsum(0) + before
        inside = (ends > start) & (ends <= start + len(running))
        up_to[1:][inside] = running[ends[inside] - start - 1]
        before = running[-1]
    return up_to.diff()


def sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return float64 [N]: the sum of each sequence's values, added in order."""
    total, ends = values.new_zeros(len(lengths), dtype=torch.float64), lengths.cumsum(0)
    for start in range(0, values.numel(), PART):
        part = values[start : start + PART]
        row = torch.searchsorted(ends, torch.arange(start, start + part.numel(), device=values.device), right=True)
        total.index_add_(0, row, part)
    return total


Together = Callable[[torch.Tensor], torch.Tensor]
"""Gathers [n, ...] of the held sequences into [N, ...] of all sequences, in the step's order. Every rank makes the same
calls in the same order, even with n = 0."""
Each = Callable[..., torch.Tensor]
"""Elementwise function of values [m]."""
DIGIT_BITS = 4
"""Bits of a float32 that one round of ``Tokens.quantile`` determines; a sequence then has 16 counts."""


def alone(partial: torch.Tensor) -> torch.Tensor:
    """Return ``partial``: the ``Together`` of a rank that holds all sequences."""
    return partial


class Totals(NamedTuple):
    """Summary of a step's values. NaN among them makes all fields NaN except ``number``."""

    number: int
    sum: float
    max: float
    min: float

    @property
    def mean(self) -> float:
        """Mean; 0 without values."""
        return self.sum / self.number if self.number else 0.0

    def spread(self, name: str) -> dict[str, float]:
        """Return ``name/mean``, ``name/max``, ``name/min``; {} without values."""
        if not self.number:
            return {}
        return {f"{name}/mean": self.mean, f"{name}/max": self.max, f"{name}/min": self.min}


def totals_of(values: torch.Tensor) -> Totals:
    """Return the totals of values that every rank has."""
    partial = _partials(values.double().numpy(), np.array([len(values)]))
    return _reduced(torch.from_numpy(partial))


@dataclass(frozen=True)
class Tokens:
    """Tokens of a step to reduce: the held ones, and the function that gathers results."""

    mask: torch.Tensor
    """bool [T]; M positions are True. Values at other positions are ignored."""
    lengths: torch.Tensor
    """int64 [n], lengths of the held sequences; their sum is T."""
    together: Together = alone

    def totals(self, each: Each, *values: torch.Tensor) -> Totals:
        """Return totals of ``each`` over the kept ``values`` [T] of all sequences of the step, in float64."""
        return self.totals_of_each(lambda *kept: (each(*kept),), *values)[0]

    def totals_of_each(self, functions: Callable[..., Sequence[torch.Tensor]], *values: torch.Tensor) -> list[Totals]:
        """Return totals of each result of ``functions``, which share one pass over the tokens."""
        number_of_results = len(functions(*(x[:0] for x in values)))
        partial = [np.empty((0, number_of_results, 4))]
        for number, kept in self.groups(*values):
            partial.append(np.stack([_partials(x.double().numpy(), number) for x in functions(*kept)], axis=1))
        whole = self.together(torch.from_numpy(np.concatenate(partial)))
        return [_reduced(of_one.contiguous()) for of_one in whole.unbind(1)]

    def variance(self, mean: float, each: Each, *values: torch.Tensor) -> float:
        """Return the unbiased variance of ``each`` over the kept values, given the ``mean``; NaN for fewer than 2."""
        squares = self.totals(lambda *kept: (each(*kept).double() - mean).square(), *values)
        return squares.sum / (squares.number - 1) if squares.number > 1 else math.nan

    def quantile(self, at: float, each: Each, *values: torch.Tensor) -> float:
        """Return quantile ``at`` of ``each`` (float32, not negative) over all sequences, rounded up to the next value.

        Exact, although no rank has all values: bits of non-negative floats have the order of the floats, and each round
        finds the next bits from counts per sequence. NaN counts as the largest. Raises AssertionError without tokens.
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
        """Yield (number of kept tokens [g], kept values [m] of each of ``values`` [T]) for the held sequences that
        begin within the same ``PART`` positions."""
        begins = self.lengths.cumsum(0) - self.lengths
        sizes = torch.unique_consecutive(begins // PART, return_counts=True)[1].tolist()
        lengths = self.lengths.split(sizes)
        positions = [int(of_group.sum()) for of_group in lengths]
        split = (x.split(positions) for x in (self.mask, *values))
        for of_group, mask, *own in zip(lengths, *split, strict=True):
            places = np.flatnonzero(mask.numpy())
            number = np.diff(np.searchsorted(places, of_group.cumsum(0).numpy()), prepend=0)
            index = torch.from_numpy(places)  # once: indexing each of ``values`` by the mask is 4 times as slow
            yield number, tuple(x.index_select(0, index) for x in own)


def _partials(x: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return float64 [g, 4]: fields of ``Totals`` of each sequence, from values [m]. numpy sums with one thread."""
    sums = _by_sequence(np.add, x, number, 0.0)
    extremes = (_by_sequence(np.maximum, x, number, -np.inf), _by_sequence(np.minimum, x, number, np.inf))
    return np.stack([number.astype(np.float64), sums, *extremes], axis=1)


def _reduced(partial: torch.Tensor) -> Totals:
    """Return the totals of all sequences, from their partial results [N, 4]."""
    with np.errstate(all="ignore"):
        number, total, largest, smallest = partial.numpy().T
        # Adding 0 turns -0.0 into 0.0, so that the order of both does not matter.
        highest, lowest = largest.max(initial=-np.inf) + 0.0, smallest.min(initial=np.inf) + 0.0
        return Totals(int(number.sum()), float(total.sum()), float(highest), float(lowest))


def _by_sequence(operation: np.ufunc, x: np.ndarray, number: np.ndarray, of_none: float) -> np.ndarray:
    """Return [g]: the reduction of each sequence's values among [m]; ``of_none`` for a sequence without values."""
    result, there = np.full(len(number), of_none, x.dtype), number > 0
    if there.any():
        with np.errstate(all="ignore"):  # NaN and infinities go through
            result[there] = operation.reduceat(x, (number.cumsum() - number)[there])
    return result


def _histograms(digits: np.ndarray, number: np.ndarray, bins: int) -> np.ndarray:
    """Return int64 [g, bins]: counts of the values 0 .. bins-1 among each sequence's digits [m]."""
    row = np.repeat(np.arange(len(number)) * bins, number)
    return np.bincount(row + digits, minlength=len(number) * bins).reshape(len(number), bins)
