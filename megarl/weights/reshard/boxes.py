"""Axis-aligned boxes of elements: the only geometry in resharding.

A box is one half-open interval (lo, hi) per axis. Every function here is pure and independent of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def whole(shape: Shape) -> Box:
    """The box of all elements of a tensor."""
    return tuple((0, extent) for extent in shape)


def shape_of(box: Box) -> Shape:
    """Extents of a box."""
    return tuple(hi - lo for lo, hi in box)


def start_of(box: Box) -> Shape:
    """First index of a box along each axis."""
    return tuple(lo for lo, _ in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Common elements, or ``None``."""
    out = []
    for (a_lo, a_hi), (b_lo, b_hi) in zip(a, b, strict=True):
        lo, hi = max(a_lo, b_lo), min(a_hi, b_hi)
        if lo >= hi:
            return None
        out.append((lo, hi))
    return tuple(out)


def contains(outer: Box, inner: Box) -> bool:
    """True if ``inner`` is inside ``outer``."""
    return len(outer) == len(inner) and all(o[0] <= i[0] <= i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def at(start: Shape, extents: Shape) -> Box:
    """Box of ``extents`` at ``start``. Extra leading axes of ``start`` are single indices (experts of a stack)."""
    lead = len(start) - len(extents)
    return tuple((s, s + (1 if axis < lead else extents[axis - lead])) for axis, s in enumerate(start))


def index_of(start: Shape, extents: Shape) -> tuple[int | slice, ...]:
    """Index for the view of shape ``extents`` at ``start``; leading single indices are dropped."""
    lead = len(start) - len(extents)
    return (*start[:lead], *(slice(s, s + n) for s, n in zip(start[lead:], extents, strict=True)))


def shifted(start: Shape, by: Shape) -> Shape:
    """``start`` moved by an offset within a box; leading single indices stay unchanged."""
    lead = len(start) - len(by)
    return (*start[:lead], *(s + d for s, d in zip(start[lead:], by, strict=True)))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or ``None``. Sweeps along axis 0: disjoint rows cost O(n log n)."""
    order = sorted(range(len(boxes)), key=lambda i: boxes[i])
    active: list[int] = []
    for i in order:
        active = [j for j in active if boxes[j][0][1] > boxes[i][0][0]]
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return j, i
        active.append(i)
    return None


def split(box: Box, limit: int) -> Iterator[Box]:
    """Split a box, in row-major order, into boxes of at most ``limit`` elements: by rows, and within long rows."""
    if volume(box) <= limit:
        yield box
        return
    (lo, hi), rest = box[0], box[1:]
    row = volume(rest)
    if row <= limit:
        step = limit // row
        for a in range(lo, hi, step):
            yield ((a, min(a + step, hi)), *rest)
        return
    for a in range(lo, hi):
        for tail in split(rest, limit):
            yield ((a, a + 1), *tail)
