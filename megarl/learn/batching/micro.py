"""Sequences that share a micro-batch, and micro-batches as model input.

Plain integer tensors.

Pure functions of lengths.

Packing as in DeepSeek-R1 (2501.12948): sequences are sorted by length and put by best fit into chunks with a token
limit. Chunks are dealt to the ranks so that attention, quadratic in a length, takes each rank about equally long. If
ranks would get unequal numbers, the sequences are spread over more chunks. A rank is idle only if there are too few
sequences.

Shape legend: b rows, S positions of a row (over all ranks of a context-parallel group), n sequences in the micro-batch.
A packed micro-batch has b = 1 and its sequences one after the other. Its padding forms short separate sequences,
because attention costs the square of a length.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from megarl.learn.batching.sequences import IGNORED, Sequences


def share_rows(lengths: torch.Tensor, cp: int) -> torch.Tensor:
    """int64 [T]: position of each packed token after concatenating the shares of all ``cp`` ranks.

    A sequence is split into 2 * cp equal pieces; rank r has pieces r and 2 * cp - 1 - r (Megatron's zigzag, which gives
    every rank equal work under a causal mask). A rank's share has its two pieces of every sequence in order.
    ``lengths``: lengths of the whole sequences, multiples of 2 * cp.

    Raises:
        ValueError: a length is no multiple of 2 * cp.
    """
    lengths = lengths.to("cpu", torch.int64)
    if bool((lengths % (2 * cp)).any()):
        raise ValueError(
            f"sequence lengths {lengths.tolist()} are not all multiples of 2*cp={2 * cp}: pad each sequence"
        )
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = lengths.cumsum(0) - lengths
    offset = torch.arange(len(sequence)) - starts[sequence]
    size = lengths[sequence] // (2 * cp)
    piece, within = offset // size, offset % size
    second = piece >= cp
    rank = torch.where(second, 2 * cp - 1 - piece, piece)
    return rank * (len(sequence) // cp) + starts[sequence] // cp + within + size * second


Chunk = list[int]
"""Indices of the units in one micro-batch."""


@dataclass(frozen=True)
class MicroBatching:
    """Limits of a model's micro-batches."""

    dp: int = 1
    cp: int = 1
    multiple: int = 1
    """Divisor of a micro-batch's tokens on each rank (sequence parallelism splits them)."""
    chunks: int = 1
    """Divisor of the number of micro-batches (interleaved pipelines process them in turns)."""
    max_tokens: int | None = None
    """Maximum tokens of a packed micro-batch; None pads sequences to the longest, ``rows`` per micro-batch."""
    rows: int = 1
    max_patches: int | None = None
    """Maximum image patches of a packed micro-batch, counting each sequence's images; None means no limit."""

    def padded(self, length: int) -> int:
        """Return the positions that a sequence occupies: context parallelism splits it into 2·cp equal pieces."""
        piece = 2 * self.cp if self.cp > 1 else 1
        return length + -length % piece


def best_fit(sizes: Sequence[int], capacity: int) -> list[Chunk]:
    """Pack by best-fit decreasing: put each item, largest first, into the fullest chunk with room for it.

    Uses at most 11/9 of the minimum number of chunks, + 1 (Johnson, 1973); O(n log n). Raises ValueError for an item
    larger than a chunk.
    """
    chunks: list[Chunk] = []
    room: list[tuple[int, int]] = []  # (free, chunk), sorted
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[item] > capacity:
            raise ValueError(f"an item of {sizes[item]} does not fit into a chunk of {capacity}")
        at = bisect.bisect_left(room, (sizes[item], -1))
        free, chunk = room.pop(at) if at < len(room) else (capacity, len(chunks))
        if chunk == len(chunks):
            chunks.append([])
        chunks[chunk].append(item)
        bisect.insort(room, (free - sizes[item], chunk))
    return chunks


def spread(sizes: Sequence[int], number: int) -> list[Chunk]:
    """Spread items, longest first, each into the emptiest of ``number`` chunks (Graham, 1969): the fullest has at most
    4/3 of the minimum."""
    chunks: list[Chunk] = [[] for _ in range(number)]
    heap = [(0, chunk) for chunk in range(number)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, chunk = heap[0]
        chunks[chunk].append(item)
        heapq.heapreplace(heap, (load + sizes[item], chunk))
    return chunks


def deal(
    lengths: Sequence[Sequence[int]], micro_batching: MicroBatching, patches: Sequence[int] | None = None
) -> list[list[Chunk]]:
    """Deal units (sequences that stay together, given by their lengths): ``result[dp_rank][micro-batch]``.

    Every rank gets equally many micro-batches, at least one; an empty one is a dummy. Raises ValueError for a unit that
    does not fit.

    Args:
        patches: Image patches of each unit; None without images.
    """
    if micro_batching.max_tokens is None:
        return _deal_rows(lengths, micro_batching)
    sizes = [sum(micro_batching.padded(n) for n in unit) for unit in lengths]
    if patches is not None and micro_batching.max_patches is not None:
        # Use the larger share of the two limits: if the shares add up to at most 1, both limits hold.
        tokens, most = micro_batching.max_tokens, micro_batching.max_patches
        sizes = [max(size, -(-number * tokens // most)) for size, number in zip(sizes, patches, strict=True)]
    least = best_fit(sizes, micro_batching.max_tokens)
    number = _up(max(len(least), 1), micro_batching.dp * micro_batching.chunks)
    even = spread(sizes, number)

    def fullest(chunks: list[Chunk]) -> int:
        return max((sum(sizes[i] for i in chunk) for chunk in chunks), default=0)

    chosen = min(even, least, key=fullest)
    while len(chosen) < number:
        chosen.append(_half_of(max(chosen, key=len, default=[]), sizes))
    cost = [sum(n * n for i in chunk for n in lengths[i]) for chunk in chosen]
    order = sorted(range(number), key=lambda c: (-cost[c], c))
    ranks: list[list[Chunk]] = [[] for _ in range(micro_batching.dp)]
    for turn, start in enumerate(range(0, number, micro_batching.dp)):
        dealt = order[start : start + micro_batching.dp]
        for rank, chunk in zip(range(micro_batching.dp), dealt if turn % 2 == 0 else reversed(dealt), strict=True):
            ranks[rank].append(sorted(chosen[chunk]))
    return ranks


def _deal_rows(lengths: Sequence[Sequence[int]], micro_batching: MicroBatching) -> list[list[Chunk]]:
    """Deal units to the ranks in turn, with as many rows per micro-batch as the settings allow."""
    each = max((len(unit) for unit in lengths), default=1)
    units = max(1, micro_batching.rows // each)
    per_rank = -(-len(lengths) // micro_batching.dp)
    number = _up(max(1, -(-per_rank // units)), micro_batching.chunks)
    ranks = []
    for rank in range(micro_batching.dp):
        mine = list(range(rank, len(lengths), micro_batching.dp))
        ranks.append([mine[start * units : (start + 1) * units] for start in range(number)])
    return ranks


def _half_of(chunk: Chunk, sizes: Sequence[int]) -> Chunk:
    """Remove about half of a chunk and return it; a chunk with one item stays."""
    kept, taken = spread([sizes[i] for i in chunk], 2)
    items = list(chunk)
    chunk[:] = [items[i] for i in kept]
    return [items[i] for i in taken]


def _up(value: int, multiple: int) -> int:
    return value + -value % multiple


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
