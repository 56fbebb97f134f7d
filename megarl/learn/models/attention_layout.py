"""Index arithmetic of the attention over packed sequences: buckets of similar length, taken from context-parallel
shares.

Plain tensors of integers, computed once per micro-batch on the CPU; nothing here imports Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.learn.batching.zigzag import share_rows

PADDING_BOUND = 1.5
"""Places of the buckets per token, at most. So padded queries, keys, values take at most half as much again as the
packed ones."""


LONG = 8192
"""Tokens of a sequence from which on a GPU attends to it alone: one of 16,384 tokens took 0.6 to 1.0 of the time that
torch's kernel for packed sequences took, on an H200 (docs/benchmarks/gpu.md)."""


@dataclass(frozen=True)
class Buckets:
    """Places for the T tokens of packed sequences, in blocks of [sequences, width] that follow each other."""

    shapes: tuple[tuple[int, int], ...]
    """(sequences, width) of each bucket, narrowest first."""
    source: torch.Tensor
    """int64 [P], P = sum of sequences * width: the token at each place; after a sequence's end its own last token."""
    place: torch.Tensor
    """int64 [T]: the place of each token. ``source[place] == arange(T)``."""

    @property
    def are_long_and_full(self) -> bool:
        """True where every sequence has ``LONG`` tokens or more and none is padded."""
        return len(self.source) == len(self.place) and min((width for _, width in self.shapes), default=0) >= LONG


def buckets(lengths: torch.Tensor) -> Buckets:
    """Deal sequences (int64 [n], in the order in which they are packed) to buckets whose width is their longest
    sequence.

    Lengths in (2^k, 3 * 2^(k-1)] share a bucket, and those in (3 * 2^(k-1), 2^(k+1)]: no sequence is padded to
    1.5 times its length, and n sequences of lengths up to L make at most 2 * log2(L) + 1 buckets. Empty sequences have
    no place.
    """
    lengths = lengths.to("cpu", torch.int64)
    starts = lengths.cumsum(0) - lengths
    upper = 2 ** torch.ceil(torch.log2(lengths.clamp_min(1).double())).long()  # exact: doubles hold powers of two
    classes = torch.where(4 * lengths <= 3 * upper, 3 * upper, 4 * upper)
    shapes, sources, place, base = [], [], torch.empty(int(lengths.sum()), dtype=torch.int64), 0
    for size in classes[lengths > 0].unique().tolist():
        (chosen,) = torch.where((classes == size) & (lengths > 0))
        width = int(lengths[chosen].max())
        column, ends = torch.arange(width), lengths[chosen, None]
        tokens = starts[chosen, None] + torch.minimum(column, ends - 1)
        real = (column < ends).flatten()
        sources.append(tokens.flatten())
        place[sources[-1][real]] = base + torch.arange(len(chosen) * width)[real]
        shapes.append((len(chosen), width))
        base += len(chosen) * width
    return Buckets(tuple(shapes), torch.cat(sources) if sources else place, place)


@dataclass(frozen=True)
class PackedLayout:
    """``Buckets`` that take tokens from, and give them back to, the shares of all context-parallel ranks laid one after
    the other."""

    buckets: Buckets
    order: torch.Tensor | None
    """int64 [T]: the row of each token among the shares (``share_rows``); None where there is one share."""


def on_device(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy of ``cu_seqlens`` (int32 [n+1], on the host) that ``lengths_of`` needs not wait for."""
    copy = cu_seqlens.to(device)
    copy._megarl_lengths = cu_seqlens.long().diff()  # type: ignore[attr-defined]
    return copy


def lengths_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """int64 [n] on the host: lengths. Waits for the device unless ``on_device`` made ``cu_seqlens``."""
    known: torch.Tensor | None = getattr(cu_seqlens, "_megarl_lengths", None)
    return cu_seqlens.to("cpu", torch.int64).diff() if known is None else known


def packed_layout(cu_seqlens: torch.Tensor, cp: int) -> PackedLayout:
    """The layout of one packed chunk, on the device of ``cu_seqlens`` (int32 [n+1], of the whole sequences)."""
    lengths = lengths_of(cu_seqlens)
    found = buckets(lengths)
    device = cu_seqlens.device
    if cp == 1:
        return PackedLayout(Buckets(found.shapes, found.source.to(device), found.place.to(device)), None)
    rows = share_rows(lengths, cp)
    place = torch.empty_like(found.place)
    place[rows] = found.place
    return PackedLayout(Buckets(found.shapes, rows[found.source].to(device), place.to(device)), rows.to(device))
