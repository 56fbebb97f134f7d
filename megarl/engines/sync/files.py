"""Weights that an engine reads from a model's files, and their comparison with those files. Runs inside vLLM's
workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megarl.core.errors import WeightsDiffer, first_of
from megarl.weights.checkpoint.formats.hf_source import open_hf
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.buckets import wire_dtype
from megarl.weights.reshard.layout import Box, Layout

ELEMENTS = 4 << 20
"""Elements read from the files and compared in one piece."""
SHOWN = 4
ROUNDED = 0.05
"""Largest relative distance of a tensor that was rounded to 8 bits."""


def read_files(
    layout: Layout,
    rank: int,
    write: Callable[[str], torch.Tensor],
    wrote: Callable[[str, int], None],
    path: Path,
    dtype: torch.dtype,
) -> None:
    """Fill a worker's local tensors, padding included, from a model's files; reads only the worker's slices.

    Args:
        write: Local tensor by its name, in the layout's shape.
        wrote: Called with a local tensor's name and the number of its written elements.
        dtype: The model's dtype, to which values are cast.
    """
    source, padding = open_hf(path), defaultdict[str, list[boxes.Box]](list)
    for pad in layout.padding(rank):
        padding[pad.local].append(pad.box)

    def zero_padding(local: str) -> None:
        for box in padding.pop(local, ()):
            write(local)[boxes.index_of(boxes.start_of(box), boxes.shape_of(box))].zero_()
            wrote(local, boxes.volume(box))

    try:
        for piece in layout.pieces(rank):
            wire = wire_dtype(layout, piece.tensor, dtype)
            zero_padding(piece.local)
            for box in boxes.split(piece.box, ELEMENTS):
                start = boxes.shifted(piece.at, tuple(b[0] - p[0] for b, p in zip(box, piece.box, strict=True)))
                values = source.read(piece.tensor, box).to(wire)
                write(piece.local)[boxes.index_of(start, boxes.shape_of(box))].copy_(values)
                wrote(piece.local, boxes.volume(box))
        for local in list(padding):
            zero_padding(local)
    finally:
        source.close()


def compare_with_files(
    layout: Layout, rank: int, read: Callable[[str], torch.Tensor], path: Path, dtype: torch.dtype
) -> int:
    """Compare a worker's weights with the files, element by element; return the number of elements.

    The files are read and sliced by megarl, so two independent loaders must agree. Numbers are compared, not bits,
    because a packed matrix loses the sign of zero and subnormal numbers.

    Args:
        read: Local tensor by its name, in the layout's shape.

    Raises:
        WeightsDiffer: an element differs, with the names of the tensors.
    """
    source, count, wrong = open_hf(path), 0, dict[str, int]()
    try:
        for piece in layout.pieces(rank):
            held = read(piece.local)[boxes.index_of(piece.at, boxes.shape_of(piece.box))]
            wire = wire_dtype(layout, piece.tensor, dtype)
            for box in boxes.split(piece.box, ELEMENTS):
                within = tuple(
                    slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, piece.box, strict=True)
                )
                differ = _differing(held[within], source.read(piece.tensor, box).to(wire))
                count += boxes.volume(box)
                if differ:
                    wrong[piece.tensor] = wrong.get(piece.tensor, 0) + differ
    finally:
        source.close()
    if wrong:
        shown = first_of([f"{number} elements of {name}" for name, number in wrong.items()], SHOWN)
        raise WeightsDiffer(f"the engine computes with other weights than {path}: {shown} differ")
    return count


def _differing(held: torch.Tensor, stored: torch.Tensor) -> int:
    # An engine may keep more digits of a stored value than its dtype has (float32 decays of delta nets).
    stored, held = stored.to(held.device), held.to(stored.dtype)
    faint = (held == 0) & (stored.abs() < torch.finfo(stored.dtype).tiny)
    return int((~((held == stored) | faint)).sum())


def differing_weights(
    layout: Layout, rank: int, read: Callable[[str], torch.Tensor], path: Path, dtype: torch.dtype
) -> dict[str, str]:
    """Return name -> description of every tensor that differs from the files: which other tensor it is, or how far it
    lies from its own. Arguments as of ``compare_with_files``."""
    source, wrong = open_hf(path), dict[str, tuple[torch.Tensor, torch.Tensor]]()
    try:
        stored = {(piece.tensor, piece.box): source.read(piece.tensor, piece.box) for piece in layout.pieces(rank)}
    finally:
        source.close()
    for piece in layout.pieces(rank):
        held = read(piece.local)[boxes.index_of(piece.at, boxes.shape_of(piece.box))]
        own = stored[piece.tensor, piece.box].to(wire_dtype(layout, piece.tensor, dtype))
        if _differing(held, own):
            wrong[piece.tensor] = held.float(), own.float()
    return {name: _described(name, *pair, stored) for name, pair in wrong.items()}


def _described(name: str, held: torch.Tensor, own: torch.Tensor, stored: Mapping[tuple[str, Box], torch.Tensor]) -> str:
    if not held.any():
        return "is zero"
    for (other, _), tensor in stored.items():
        if other != name and tensor.shape == held.shape and torch.equal(tensor.float(), held):
            return f"has the values of {other}"
    if held.dim() > 1 and torch.equal(held.sum(-1).sort().values, own.sum(-1).sort().values):
        return "has its rows in another order"
    far = float((held - own).norm() / own.norm())
    return f"is rounded, by {far:.1%}" if far < ROUNDED else f"has other values, {far:.0%} away"
