"""Executes a plan between two checkpoints in files, distributed over threads.

Reading, casting, digests and writing all release the GIL.

Memory is a few blocks for each worker, independent of tensor sizes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from typing import NamedTuple, TypeVar

import torch
from tqdm import tqdm

from megarl.core.errors import CheckpointError
from megarl.ops import slice_digest
from megarl.weights.checkpoint.formats.slices import BoxIndex, Source, value_fault
from megarl.weights.reshard import layout
from megarl.weights.reshard.layout import Box
from megarl.weights.reshard.plan import Move, ReshardPlan

T = TypeVar("T")
Count = Callable[[int], None]
"""Adds finished bytes to the progress; raises if another worker has failed."""


def each(
    what: str, items: Sequence[T], act: Callable[[T, Count], None], *, total: int, workers: int, progress: bool = True
) -> None:
    """Run ``act`` for every item; the first error stops all. ``total``: bytes that all items count together."""
    lock, stop = threading.Lock(), threading.Event()
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None if progress else True)

    def count(size: int) -> None:
        if stop.is_set():
            raise _Stopped
        with lock:
            bar.update(size)

    # One torch thread per worker: the workers are the parallelism.
    pool = ThreadPoolExecutor(max(workers, 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(act, item, count) for item in items]):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        bar.close()


class _Stopped(Exception):
    """Another worker failed; never visible outside, because that worker's error is raised first."""


BLOCK_ELEMENTS = 4 << 20
_IN_FLIGHT = 64 << 20
"""Total bytes of all workers' blocks. Each worker has two buffers, at most 4 bytes an element (8 for float64)."""
_MODULUS = 1 << 64

Digests = dict[str, int]
"""Logical tensor -> digest of the elements read so far."""


class Region(NamedTuple):
    """A box of a target tensor that is contiguous, row-major, in a file of the target."""

    local: str
    box: Box


class OutFile(NamedTuple):
    name: str
    regions: tuple[Region, ...]


class Transfer:
    """The moves of a plan between two one-rank layouts, by destination.

    Args:
        plan: From the source checkpoint's layout to the target's.
        source: Tensors of the source, under the source layout's local names.
        dtypes: Local name in the target -> dtype.
        workers: Number of threads that request blocks concurrently; more threads get smaller blocks.
        nonfinite: Collects a text for each tensor with non-finite values; ``None`` makes such a value an error.
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
            moves[move.dst_local].append((layout.at(move.dst_at, layout.shape_of(move.box)), move))
        self._moves = {local: BoxIndex(items) for local, items in moves.items()}

    def blocks(self, region: Region, digests: Digests) -> Iterator[torch.Tensor]:
        """Yield the region's source elements as contiguous row-major blocks; add their digests to ``digests``.

        Raises CheckpointError for damaged files and non-finite values.
        """
        dtype, index = self.dtypes[region.local], self._moves.get(region.local)
        scratch = _Scratch(min(self._block, layout.volume(region.box)))
        for box in layout.split(region.box, self._block):
            block = scratch.get(dtype, layout.shape_of(box))
            found = list(index.overlapping(box)) if index else []
            if sum(layout.volume(common) for common, _ in found) < block.numel():
                block.zero_()  # padding
            for common, move in found:
                view = _part(block, box, common, move)
                self._read(common, move, view, scratch)
                self._add(digests, view, common, move)
            yield block

    def digest(self, region: Region, written: Source, digests: Digests) -> Iterator[int]:
        """Add digests of a written region to ``digests``; yield the number of elements after each block."""
        dtype, index = self.dtypes[region.local], self._moves.get(region.local)
        scratch = _Scratch(min(self._block, layout.volume(region.box)))
        for box in layout.split(region.box, self._block):
            block = written.read(region.local, box, scratch.get(dtype, layout.shape_of(box)))
            for common, move in index.overlapping(box) if index else ():
                self._add(digests, _part(block, box, common, move), common, move)
            yield block.numel()

    def _read(self, common: Box, move: Move, view: torch.Tensor, scratch: _Scratch) -> None:
        """Read directly into the block if its dtype equals the file's, else through a second buffer."""
        start = layout.shifted(move.src_at, _offset(common, move))
        box = layout.at(start, tuple(view.shape))
        shape, dtype = layout.shape_of(box), self.source.dtypes[move.src_local]
        direct = view.is_contiguous() and view.dtype == dtype
        out = view.view(shape) if direct else scratch.get(dtype, shape, second=True)
        values = self.source.read(move.src_local, box, out)
        if values.data_ptr() != view.data_ptr():
            view.copy_(values.view(view.shape))
        if (fault := value_fault(values, view)) is not None:
            self._note(move, fault)

    def _note(self, move: Move, fault: str) -> None:
        """Record non-finite values, or raise CheckpointError."""
        text = f"{move.tensor} in {self.source.file_of(move.src_local)} {fault}"
        if self.nonfinite is None:
            raise CheckpointError(f"{text}; --allow-nonfinite converts it as it is")
        self.nonfinite[move.tensor] = text

    def _add(self, digests: Digests, view: torch.Tensor, common: Box, move: Move) -> None:
        start = tuple(lo + by for (lo, _), by in zip(move.box, _offset(common, move), strict=True))
        partial = slice_digest(view, start=start, shape=self.tensors[move.tensor])
        digests[move.tensor] = (digests.get(move.tensor, 0) + partial) % _MODULUS


class _Scratch:
    """Two reusable buffers. Memory freed per block would stay with the thread that allocated it."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._buffers: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def get(self, dtype: torch.dtype, shape: tuple[int, ...], *, second: bool = False) -> torch.Tensor:
        key = dtype, second
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._elements, dtype=dtype)
        return self._buffers[key][: prod(shape)].view(shape)


def _offset(common: Box, move: Move) -> tuple[int, ...]:
    """Start of a part of the move's destination box, relative to that box, along the logical tensor's axes."""
    lead = len(move.dst_at) - len(move.box)
    return tuple(lo - at for (lo, _), at in zip(common[lead:], move.dst_at[lead:], strict=True))


def _part(block: torch.Tensor, box: Box, common: Box, move: Move) -> torch.Tensor:
    """View of ``common`` in the block for ``box``, with the logical tensor's axes."""
    lead = len(move.dst_at) - len(move.box)
    start = tuple(lo - first for (lo, _), (first, _) in zip(common, box, strict=True))
    return block[layout.index_of(start, layout.shape_of(common[lead:]))]


def add(total: Digests, more: Mapping[str, int]) -> None:
    for name, value in more.items():
        total[name] = (total.get(name, 0) + value) % _MODULUS
