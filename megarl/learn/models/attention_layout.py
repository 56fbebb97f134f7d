"""Index arithmetic for attention over packed sequences: buckets of similar length, taken from context-parallel shares.

Plain integer tensors, computed once per micro-batch on the CPU; this module does not import Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.learn.batching.packing import share_rows

PADDING_BOUND = 1.5
"""Maximum bucket places per token: padded queries, keys and values are at most 1.5 times as large as packed ones."""


LONG = 8192
"""Minimum tokens of a sequence that a GPU attends to separately: with 16,384 tokens that took 0.6 to 1.0 of the time of
torch's kernel for packed sequences on an H200 (docs/benchmarks/gpu.md)."""


@dataclass(frozen=True)
class Buckets:
    """Places for the T tokens of packed sequences, in consecutive blocks of [sequences, width]."""

    shapes: tuple[tuple[int, int], ...]
    """(sequences, width) of each bucket, narrowest first."""
    source: torch.Tensor
    """int64 [P], P = sum of sequences * width: the token at each place; padding repeats the sequence's last token."""
    place: torch.Tensor
    """int64 [T]: the place of each token. ``source[place] == arange(T)``."""

    @property
    def are_long_and_full(self) -> bool:
        """True if every sequence has ``LONG`` tokens or more and none is padded."""
        return len(self.source) == len(self.place) and min((width for _, width in self.shapes), default=0) >= LONG


def buckets(lengths: torch.Tensor) -> Buckets:
    """Deal sequences (int64 [n] lengths, in packing order) to buckets; a bucket's width is its longest sequence.

    Each bucket takes lengths in (2^k, 3 * 2^(k-1)] or in (3 * 2^(k-1), 2^(k+1)]. So no sequence is padded to 1.5 times
    its length, and n sequences of lengths up to L make at most 2 * log2(L) + 1 buckets. Empty sequences have no place.
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
    """``Buckets`` that read and write tokens in the concatenated shares of all context-parallel ranks."""

    buckets: Buckets
    order: torch.Tensor | None
    """int64 [T]: the row of each token among the shares (``share_rows``); None with one share."""


def on_device(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``cu_seqlens`` (int32 [n+1], on the host) to a device; ``lengths_of`` need not wait for the copy."""
    copy = cu_seqlens.to(device)
    copy._megarl_lengths = cu_seqlens.long().diff()  # type: ignore[attr-defined]
    return copy


def lengths_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return int64 [n] lengths on the host. Waits for the device unless ``on_device`` made ``cu_seqlens``."""
    known: torch.Tensor | None = getattr(cu_seqlens, "_megarl_lengths", None)
    return cu_seqlens.to("cpu", torch.int64).diff() if known is None else known


def packed_layout(cu_seqlens: torch.Tensor, cp: int) -> PackedLayout:
    """Compute the layout of one packed chunk, on the device of ``cu_seqlens`` (int32 [n+1], of the whole sequences)."""
    lengths = lengths_of(cu_seqlens)
    found = buckets(lengths)
    device = cu_seqlens.device
    if cp == 1:
        return PackedLayout(Buckets(found.shapes, found.source.to(device), found.place.to(device)), None)
    rows = share_rows(lengths, cp)
    place = torch.empty_like(found.place)
    place[rows] = found.place
    return PackedLayout(Buckets(found.shapes, rows[found.source].to(device), place.to(device)), rows.to(device))
