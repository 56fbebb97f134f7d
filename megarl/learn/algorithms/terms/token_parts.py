"""A step's tokens, part by part: what a computation takes beside its input and result does not grow with the step.

Every result has the bits that it would have if it were computed at once: parts are written into one tensor, and only
then reduced. Shape legend: T positions of a step, M of them kept by a mask, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

PART = 2**16
"""Positions of a part."""


def parts(mask: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(positions of [T], where those of them that ``mask`` keeps lie in [M])."""
    first = 0
    for start in range(0, mask.numel(), PART):
        number = int(torch.count_nonzero(mask[start : start + PART]))
        yield slice(start, start + PART), slice(first, first + number)
        first += number


def doubles(mask: torch.Tensor, each: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    """float64 [M]: ``each(*values)``, elementwise, of what ``mask`` [T] keeps of the ``values`` [T]."""
    result = torch.empty(int(torch.count_nonzero(mask)), dtype=torch.float64, device=mask.device)
    for at, kept in parts(mask):
        result[kept] = each(*(x[at][mask[at]] for x in values))
    return result


def picked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values[mask]``, [T] -> [M]."""
    result = values.new_empty(int(torch.count_nonzero(mask)))
    for at, kept in parts(mask):
        result[kept] = values[at][mask[at]]
    return result


def spread_out(kept: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[M] of kept tokens as [T], 0 elsewhere."""
    result = torch.zeros(mask.shape, dtype=kept.dtype, device=kept.device)
    for at, place in parts(mask):
        result[at][mask[at]] = kept[place]
    return result


def repeated(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T]: value i of [N] ``lengths[i]`` times."""
    result = values.new_empty(int(lengths.sum()))
    for value, part in zip(values, result.split(lengths.tolist()), strict=True):
        part.copy_(value)
    return result


def counts(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [N]: how many positions of each sequence ``mask`` [T] keeps."""
    return torch.tensor(
        [int(torch.count_nonzero(part)) for part in mask.split(lengths.tolist())], dtype=torch.int64, device=mask.device
    )


def sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """float64 [N]: of each sequence's values, added one after another."""
    total, ends = values.new_zeros(len(lengths), dtype=torch.float64), lengths.cumsum(0)
    for start in range(0, values.numel(), PART):
        part = values[start : start + PART]
        row = torch.searchsorted(ends, torch.arange(start, start + part.numel(), device=values.device), right=True)
        total.index_add_(0, row, part)
    return total
