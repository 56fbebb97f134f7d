"""Processing of a step's tokens in parts, so that temporary memory does not grow with the step.

Every result has the same bits as if computed in one piece: parts are written into one tensor, which is reduced
afterwards. Shape legend: T positions of a step, M of them kept by a mask, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    return torch.tensor(
        [int(torch.count_nonzero(part)) for part in mask.split(lengths.tolist())], dtype=torch.int64, device=mask.device
    )


def sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return float64 [N]: the sum of each sequence's values, added in order."""
    total, ends = values.new_zeros(len(lengths), dtype=torch.float64), lengths.cumsum(0)
    for start in range(0, values.numel(), PART):
        part = values[start : start + PART]
        row = torch.searchsorted(ends, torch.arange(start, start + part.numel(), device=values.device), right=True)
        total.index_add_(0, row, part)
    return total
