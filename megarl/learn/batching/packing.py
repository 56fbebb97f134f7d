"""Choice of the sequences that share a micro-batch, and positions of their tokens in context-parallel shares.

Plain integer tensors.

Pure functions of lengths.

Packing as in DeepSeek-R1 (2501.12948): sequences are sorted by length and put by best fit into chunks with a token
limit. Chunks are dealt to the ranks so that attention, quadratic in a length, takes each rank about equally long. If
ranks would get unequal numbers, the sequences are spread over more chunks. A rank is idle only if there are too few
sequences.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
