"""Boxes of tensors that lie row-major in files, read without the rest of the tensor.

Plain ``preadv``, not a memory map: mapped pages count as resident memory of the process, and a checkpoint must not.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from megarl.core.errors import CheckpointError
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box, Shape

T = TypeVar("T")


class Source(Protocol):
    """Named tensors in files, of which any box can be read; safe to use from several threads."""

    path: Path

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """The elements ``box`` of a tensor, contiguous; in ``out`` where that is given, contiguous and has their dtype
        and shape.

        Raises CheckpointError where the file does not have them.
        """
        ...

    def file_of(self, name: str) -> Path:
        """The file of a tensor, or the directory where several have a part of it."""
        ...


class OpenFiles:
    """File descriptors, opened when first read from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}

    def fd(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[path]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def read_box(
        self, path: Path, start: int, dtype: torch.dtype, shape: Shape, box: Box, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The elements ``box`` of a row-major tensor of ``shape`` whose first byte is byte ``start`` of the file."""
        out = into(out, dtype, boxes.shape_of(box))
        if out.numel() == 0:
            return out
        data = as_bytes(out)
        fd, done = self.fd(path), 0
        for first, count in _runs(shape, box):
            size = count * dtype.itemsize
            _read_into(fd, path, data[done : done + size], start + first * dtype.itemsize)
            done += size
        return out


def into(out: torch.Tensor | None, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """``out`` where a tensor of this dtype and shape can be read into it, else a new one."""
    if out is not None and out.dtype == dtype and out.shape == shape and out.is_contiguous():
        return out
    return torch.empty(shape, dtype=dtype)


def as_bytes(block: torch.Tensor) -> memoryview:
    """The elements of a contiguous tensor, to be read or written in place."""
    flat: Any = block.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _runs(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """(flat index of the first element, number of elements) of the contiguous runs of a box, in row-major order."""
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = len(shape)
    while axis > 0 and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    axis = max(axis - 1, 0)  # the first axis along which a run may be shorter than the tensor
    count = prod(hi - lo for lo, hi in box[axis:])
    tail = sum(lo * step for (lo, _), step in zip(box[axis:], steps[axis:], strict=True))
    for index in itertools.product(*(range(lo, hi) for lo, hi in box[:axis])):
        yield sum(i * step for i, step in zip(index, steps, strict=False)) + tail, count


def _read_into(fd: int, path: Path, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data[done:]], offset + done)
        if got == 0:
            raise CheckpointError(
                f"{path} ends after {os.fstat(fd).st_size} bytes, expected {offset + len(data)} or more; copy the "
                "checkpoint again"
            )
        done += got


class BoxIndex(Generic[T]):
    """Finds the boxes of one tensor that overlap a given one, fast where they are single indices along leading axes."""

    def __init__(self, items: Iterable[tuple[Box, T]]) -> None:
        items = list(items)
        axes = len(items[0][0]) if items else 0
        self._lead = next((a for a in range(axes) if any(box[a][1] - box[a][0] != 1 for box, _ in items)), axes)
        self._at: dict[Shape, list[tuple[Box, T]]] = defaultdict(list)
        for box, item in items:
            self._at[boxes.start_of(box[: self._lead])].append((box, item))

    def overlapping(self, box: Box) -> Iterator[tuple[Box, T]]:
        """(common box, item), in the order given within each leading index."""
        for lead in itertools.product(*(range(lo, hi) for lo, hi in box[: self._lead])):
            for held, item in self._at.get(lead, ()):
                common = boxes.intersect(held, box)
                if common is not None:
                    yield common, item
