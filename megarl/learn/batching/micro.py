"""Micro-batches as model input: the source of each position in a rank's ``Sequences``.

Shape legend: b rows, S positions of a row (over all ranks of a context-parallel group), n sequences in the micro-batch.
A packed micro-batch has b = 1 and its sequences one after the other. Its padding forms short separate sequences,
because attention costs the square of a length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from megarl.learn.batching.packing import MicroBatching, deal, share_rows
from megarl.learn.batching.sequences import IGNORED, Sequences

FILLER = 64
"""Maximum tokens of a padding sequence (rounded to a multiple of 2·cp, at least 2·cp)."""


@dataclass(frozen=True)
class MicroBatch:
    index: torch.Tensor
    """int64 [b, S]: position in the flat arrays of ``Sequences``; -1 is padding."""
    position: torch.Tensor
    """int64 [b, S]: position within the sequence."""
    row: torch.Tensor
    """int64 [b, S]: index of the sequence within the micro-batch; -1 is padding."""
    numbers: torch.Tensor
    """int64 [n]: indices of these sequences within the rank's."""
    cu_seqlens: torch.Tensor | None
    """int32: boundaries of the sequences, padding included; None if every row is one sequence."""
    max_seqlen: int

    def take(self, values: torch.Tensor, fill: float | int | bool = 0) -> torch.Tensor:
        """Gather values: [T] -> [b, S], padding set to ``fill``."""
        return values[self.index.clamp(min=0)].masked_fill(self.index < 0, fill)

    def targets(self, sequences: Sequences) -> torch.Tensor:
        """[b, S]: the next token if it is in the loss, else ``IGNORED``."""
        following = sequences.tokens[(self.index.clamp(min=0) + 1) % len(sequences.tokens)]
        return following.masked_fill(~self.take(sequences.mask, False), IGNORED)

    def shares(self, cp: int) -> torch.Tensor:
        """int64 [cp, S / cp]: the columns of each context-parallel rank. Of every sequence rank r has pieces r and
        2·cp-1-r of 2·cp equal pieces, so that causal attention costs each rank the same time."""
        width = self.index.shape[1]
        if cp == 1:
            return torch.arange(width)[None]
        lengths = torch.tensor([width]) if self.cu_seqlens is None else self.cu_seqlens.diff()
        return share_rows(lengths, cp).argsort().view(cp, -1)


class MicroBatches(Sequence[MicroBatch]):
    """Micro-batches made on each access: they take 24 bytes a position, so only one exists at a time."""

    def __init__(self, chunks: Sequence[list[int]], make: Callable[[list[int]], MicroBatch]) -> None:
        self._chunks, self._make = chunks, make

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, i: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, i: slice) -> MicroBatches: ...
    def __getitem__(self, i: int | slice) -> MicroBatch | MicroBatches:
        return MicroBatches(self._chunks[i], self._make) if isinstance(i, slice) else self._make(self._chunks[i])


def micro_batches(
    sequences: Sequences, micro_batching: MicroBatching, rank: int, units: Sequence[Sequence[int]] | None = None
) -> MicroBatches:
    """Make the micro-batches of data-parallel rank ``rank``; all ranks have equally many, of one shape.

    Args:
        units: Indices of the step's sequences that must share a micro-batch (pairs); other sequences are omitted. None
            makes each sequence a unit.

    Raises:
        ValueError: a unit is longer than ``micro_batching.max_tokens``.
    """
    lengths = sequences.step_lengths.tolist()
    chunks = dealt(lengths, micro_batching, units, sequences.step_patches)
    mine = chunks[rank] if sequences.share is None else [sequences.share.local(chunk) for chunk in chunks[rank]]
    starts, own = sequences.cu_seqlens, sequences.lengths.tolist()
    if micro_batching.max_tokens is None:
        rows = max(1, max(len(chunk) for part in chunks for chunk in part))
        longest = max((lengths[i] for part in chunks for chunk in part for i in chunk), default=1)
        width = _width(longest, micro_batching)
        return MicroBatches(mine, lambda chunk: _padded(chunk, starts, rows, width))
    width = _width(
        max(sum(micro_batching.padded(lengths[i]) for i in chunk) for part in chunks for chunk in part), micro_batching
    )
    return MicroBatches(mine, lambda chunk: _packed(chunk, starts, own, width, micro_batching))


def dealt(
    lengths: Sequence[int],
    micro_batching: MicroBatching,
    units: Sequence[Sequence[int]] | None = None,
    patches: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Return indices of the step's sequences in each micro-batch: ``[dp_rank][micro-batch][sequence]``.

    Args:
        lengths: [N], lengths of all sequences of the step.
        units: As in ``micro_batches``.
        patches: [N]; None without images.

    Raises ValueError as ``micro_batches``.
    """
    units = [[i] for i in range(len(lengths))] if units is None else units
    of_units = None if patches is None else [sum(patches[i] for i in unit) for unit in units]
    return [
        [[number for unit in chunk for number in units[unit]] for chunk in chunks_of_rank]
        for chunks_of_rank in deal([[lengths[i] for i in unit] for unit in units], micro_batching, of_units)
    ]


def _width(longest: int, micro_batching: MicroBatching) -> int:
    """Round the width up: each rank's share is a multiple of its divisors, and has two pieces with context
    parallelism."""
    unit = micro_batching.multiple * micro_batching.cp * (2 if micro_batching.cp > 1 else 1)
    return max(longest, 1) + -max(longest, 1) % unit


def _padded(chunk: list[int], starts: torch.Tensor, rows: int, width: int) -> MicroBatch:
    numbers = torch.tensor(chunk, dtype=torch.int64)
    position = torch.arange(width).expand(rows, width)
    length = torch.zeros(rows, dtype=torch.int64)
    first = torch.zeros(rows, dtype=torch.int64)
    first[: len(chunk)] = starts[numbers]
    length[: len(chunk)] = starts[numbers + 1] - starts[numbers]
    real = position < length[:, None]
    index = (first[:, None] + position).masked_fill(~real, -1)
    row = torch.arange(rows)[:, None].expand(rows, width).masked_fill(~real, -1)
    return MicroBatch(index, position, row, numbers, None, width)


def _packed(
    chunk: list[int], starts: torch.Tensor, lengths: Sequence[int], width: int, micro_batching: MicroBatching
) -> MicroBatch:
    numbers = torch.tensor(chunk, dtype=torch.int64)
    sizes = [micro_batching.padded(lengths[i]) for i in chunk]
    piece = micro_batching.padded(max(FILLER - FILLER % (2 * micro_batching.cp), 1))
    whole, rest = divmod(width - sum(sizes), piece)
    sizes += [piece] * whole + ([rest] if rest else [])
    size = torch.tensor(sizes, dtype=torch.int64)
    ends = torch.cat([size.new_zeros(1), size.cumsum(0)])
    row = torch.repeat_interleave(torch.arange(len(sizes)), size)
    position = torch.arange(width) - ends[row]
    first, length = torch.zeros_like(size), torch.zeros_like(size)
    first[: len(chunk)] = starts[numbers]
    length[: len(chunk)] = starts[numbers + 1] - starts[numbers]
    real = position < length[row]
    index = (first[row] + position).masked_fill(~real, -1)
    return MicroBatch(
        index[None], position[None], row.masked_fill(~real, -1)[None], numbers, ends.to(torch.int32), int(size.max())
    )
