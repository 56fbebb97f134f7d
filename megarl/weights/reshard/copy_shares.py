"""Divide the elements that replicas need among data-parallel copies: arithmetic on element positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megarl.weights.reshard import boxes
from megarl.weights.reshard.wants import Want


class Share(NamedTuple):
    """Elements that a source rank sends to several destination ranks, up to the next share."""

    start: int
    """Position of the first element in the sequence wanted from the same copies."""
    src: int
    dsts: tuple[int, ...]
    """Destination ranks, ascending, that receive these elements from ``src``."""


def shares_of(dst: int, takers: Sequence[int], copies: Sequence[int], total: int) -> list[Share]:
    """Return the shares, in order, in which ``dst`` receives ``total`` elements.

    Each of n copies serves the same number of the R takers completely. The needs of the R % n other takers are laid end
    to end on a circle, divided evenly among the copies. So all copies send equally much, up to one element. A taker
    uses as few copies as possible, and no copy has an element in two of its shares.

    Args:
        takers: Destination ranks, ascending, that need the same elements from the same copies; includes ``dst``.
        copies: Source ranks that have the elements.
    """
    whole, left = divmod(len(takers), len(copies))
    first_left = whole * len(copies)
    arcs = [-(-number * left * total // len(copies)) for number in range(len(copies) + 1)]
    own, found = takers.index(dst), list[Share]()
    for start in sorted({arc % total for arc in arcs}):
        on_circle = (own - first_left) * total + start
        number = own // whole if own < first_left else bisect_right(arcs, on_circle) - 1
        dsts = tuple(takers[number * whole : (number + 1) * whole])
        lap = -(-(arcs[number] - start) // total)  # the only lap in which the copy's arc may have the element
        if lap * total + start < arcs[number + 1]:
            dsts += (takers[first_left + lap],)
        if not found or found[-1][1:] != (copies[number], dsts):
            found.append(Share(start, copies[number], dsts))
    return found


def cut(want: Want, shares: Sequence[Share]) -> Iterator[tuple[Want, Share]]:
    """Split a want along axis 0, at whole rows, where shares meet."""
    end = want.start + want.size
    number = bisect_right(shares, want.start, key=lambda share: share.start) - 1
    if number + 1 == len(shares) or shares[number + 1].start >= end:
        yield want, shares[number]
        return
    (origin, high), rest = want.box[0], want.box[1:]
    row = boxes.volume(rest)
    low = origin
    while low < high:
        border = shares[number + 1].start if number + 1 < len(shares) else end
        upper = high if border >= end else min(origin + (border - want.start + row // 2) // row, high)
        if low < upper:
            by = (low - origin, *(0 for _ in rest))
            yield (
                want._replace(
                    box=((low, upper), *rest),
                    size=(upper - low) * row,
                    src_at=boxes.shifted(want.src_at, by),
                    dst_at=boxes.shifted(want.dst_at, by),
                ),
                shares[number],
            )
            low = upper
        number += 1
