"""Carries out a plan between two checkpoints in files: reads slices, casts, sums digests and hands out bytes in the
order of the target's files. Memory is a few blocks for each worker, whatever the sizes of the tensors are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch

from megarl.core.errors import CheckpointError
from megarl.ops import slice_digest
from megarl.weights.checkpoint.formats.slices import BoxIndex, Source
from megarl.weights.checkpoint.formats.values import value_fault
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box
from megarl.weights.reshard.plan import Move, ReshardPlan

BLOCK_ELEMENTS = 4 << 20
_IN_FLIGHT = 64 << 20
"""Bytes of the blocks of all workers together: each has two buffers, of 4 bytes an element or less but for float64."""
_MODULUS = 1 << 64

Digests = dict[str, int]
"""Logical tensor -> digest of the elements seen so far."""


class Region(NamedTuple):
    """A box of a target tensor whose elements lie together, row-major, in a file of the target."""

    local: str
    box: Box


class OutFile(NamedTuple):
    name: str
    regions: tuple[Region, ...]


class Transfer:
    """The moves of a plan between two one-rank layouts, by where they go.

    Args:
        plan: From the source checkpoint's layout to the target's.
        source: Its tensors, under the source layout's local names.
        dtypes: Target local name -> dtype that it gets.
        workers: How many threads will ask for blocks at a time; the more, the smaller these are.
        nonfinite: Gets an entry for each tensor with a value that is not finite, and how; None: such a value is an
            error.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        source: Source,
        dtypes: Mapping[str, torch.dtype],
        workers: int = 1,
        nonfinite: dict[str, str] | None = None,
    ) -> None:
        self._block = max(min(BLOCK_ELEMENTS, _IN_FLIGHT // 8 // workers), 1)
        self.tensors = plan.destination.tensors
        self.source = source
        self.nonfinite = nonfinite
        self.dtypes = dtypes
        self.shapes = plan.destination.local_shapes(0)
        moves: dict[str, list[tuple[Box, Move]]] = defaultdict(list)
        for move in plan.moves_to(0):
            moves[move.dst_local].append((boxes.at(move.dst_at, boxes.shape_of(move.box)), move))
        self._moves = {local: BoxIndex(items) for local, items in moves.items()}

    def blocks(self, region: Region, digests: Digests) -> Iterator[torch.Tensor]:
        """The region's elements from the source, as contiguous blocks in row-major order; adds to ``digests``.

        Raises CheckpointError where a file does not have what it should, or a value that is not finite.
        """
        dtype, index = self.dtypes[region.local], self._moves.get(region.local)
        scratch = _Scratch(min(self._block, boxes.volume(region.box)))
        for box in boxes.split(region.box, self._block):
            block = scratch.get(dtype, boxes.shape_of(box))
            found = list(index.overlapping(box)) if index else []
            if sum(boxes.volume(common) for common, _ in found) < block.numel():
                block.zero_()  # padding
            for common, move in found:
                view = _part(block, box, common, move)
                self._read(common, move, view, scratch)
                self._add(digests, view, common, move)
            yield block

    def digest(self, region: Region, written: Source, digests: Digests) -> Iterator[int]:
        """Add to ``digests`` what was written of a region; yields the number of elements after each block."""
        dtype, index = self.dtypes[region.local], self._moves.get(region.local)
        scratch = _Scratch(min(self._block, boxes.volume(region.box)))
        for box in boxes.split(region.box, self._block):
            block = written.read(region.local, box, scratch.get(dtype, boxes.shape_of(box)))
            for common, move in index.overlapping(box) if index else ():
                self._add(digests, _part(block, box, common, move), common, move)
            yield block.numel()

    def _read(self, common: Box, move: Move, view: torch.Tensor, scratch: _Scratch) -> None:
        """Read straight into the block where its dtype and the file's are the same, else by way of a second buffer."""
        start = boxes.shifted(move.src_at, _offset(common, move))
        box = boxes.at(start, tuple(view.shape))
        shape, dtype = boxes.shape_of(box), self.source.dtypes[move.src_local]
        direct = view.is_contiguous() and view.dtype == dtype
        out = view.view(shape) if direct else scratch.get(dtype, shape, second=True)
        values = self.source.read(move.src_local, box, out)
        if values.data_ptr() != view.data_ptr():
            view.copy_(values.view(view.shape))
        if (fault := value_fault(values, view)) is not None:
            self._note(move, fault)

    def _note(self, move: Move, fault: str) -> None:
        """Take note of values that are not finite, or raise CheckpointError."""
        text = f"{move.tensor} in {self.source.file_of(move.src_local)} {fault}"
        if self.nonfinite is None:
            raise CheckpointError(f"{text}; --allow-nonfinite converts it as it is")
        self.nonfinite[move.tensor] = text

    def _add(self, digests: Digests, view: torch.Tensor, common: Box, move: Move) -> None:
        start = tuple(lo + by for (lo, _), by in zip(move.box, _offset(common, move), strict=True))
        partial = slice_digest(view, start=start, shape=self.tensors[move.tensor])
        digests[move.tensor] = (digests.get(move.tensor, 0) + partial) % _MODULUS


class _Scratch:
    """Two buffers, used again for every block: what is given back to the allocator would stay with the thread that had
    it."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._buffers: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def get(self, dtype: torch.dtype, shape: tuple[int, ...], *, second: bool = False) -> torch.Tensor:
        key = dtype, second
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._elements, dtype=dtype)
        return self._buffers[key][: prod(shape)].view(shape)


def _offset(common: Box, move: Move) -> tuple[int, ...]:
    """Start of a part of the move's destination box, counted from that box, along the logical tensor's axes."""
    lead = len(move.dst_at) - len(move.box)
    return tuple(lo - at for (lo, _), at in zip(common[lead:], move.dst_at[lead:], strict=True))


def _part(block: torch.Tensor, box: Box, common: Box, move: Move) -> torch.Tensor:
    """The view of ``common`` within the block that holds ``box``, with the logical tensor's axes."""
    lead = len(move.dst_at) - len(move.box)
    start = tuple(lo - first for (lo, _), (first, _) in zip(common, box, strict=True))
    return block[boxes.index_of(start, boxes.shape_of(common[lead:]))]


def add(total: Digests, more: Mapping[str, int]) -> None:
    for name, value in more.items():
        total[name] = (total.get(name, 0) + value) % _MODULUS
