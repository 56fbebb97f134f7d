"""Elements that destination ranks need, and the source ranks that have them. Pure geometry: chooses no sender."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box, Shape
from megarl.weights.reshard.layout import Copy, Layout, Owners, Piece, check_tiling


class Want(NamedTuple):
    """Elements ``box`` of one destination piece, available from any rank of the copy."""

    piece: Piece
    copy: Copy
    box: Box
    copies: int
    """Index into ``RankWants.sets`` of the set of ranks that have it."""
    start: int
    size: int
    """Number of elements; ``start`` elements of other wants from the same ranks come before it."""
    src_at: Shape
    dst_at: Shape


class RankWants(NamedTuple):
    """Wants of one kind of destination rank, in the order of its pieces."""

    wants: list[Want]
    sets: list[tuple[int, ...]]
    """Sets of source ranks."""
    totals: list[int]
    """Number of elements wanted from each set."""


Kind = tuple[tuple[Owners, int], ...]
"""Parts of a layout on a rank: ranks of one kind have the same content."""


class Wants:
    """Wants of the ranks of ``destination``, matched with ``source``; computed once for each kind of rank."""

    def __init__(self, source: Layout, destination: Layout) -> None:
        self._source, self._destination = source, destination
        self._known_copies: dict[str, tuple[Copy, ...]] = {}
        self._known_wants: dict[Kind, RankWants] = {}

    def of_kind(self, dst: int) -> RankWants:
        """All wants of a destination rank, cached for all ranks of the same kind."""
        kind = self._destination.kind(dst)
        if kind not in self._known_wants:
            self._known_wants[kind] = self.of(dst)
        return self._known_wants[kind]

    def of(self, dst: int, tensors: Collection[str] | None = None, sender: int | None = None) -> RankWants:
        """Intersect a destination rank's pieces with the source's boxes, and check that they tile each piece.

        With ``sender``, only boxes (of ``tensors``) on this source rank, without the check: other ranks have the rest.
        """
        wants: list[Want] = []
        numbers: dict[tuple[int, ...], int] = {}
        totals: list[int] = []
        for row, share in self._destination.rows_of(dst):
            if tensors is not None and not any(part in tensors for part in row.parts):
                continue
            for piece in row.pieces(share):
                hits = [
                    (copy, common)
                    for copy in self._copies(piece.tensor)
                    if (common := boxes.intersect(copy.box, piece.box)) is not None
                ]
                if sender is None and not (len(hits) == 1 and hits[0][1] == piece.box):
                    check_tiling(
                        f"{piece.tensor} of {self._source.name} into {piece.local} on rank {dst} of "
                        f"{self._destination.name}",
                        piece.box,
                        [(common, f"source piece {list(copy.box)}") for copy, common in hits],
                    )
                for copy, common in hits:
                    if sender is None or sender in copy.ranks:
                        number = numbers.setdefault(copy.ranks, len(totals))
                        if number == len(totals):
                            totals.append(0)
                        size = boxes.volume(common)
                        src_at = boxes.shifted(copy.at, _offset(common, copy.box))
                        dst_at = boxes.shifted(piece.at, _offset(common, piece.box))
                        wants.append(Want(piece, copy, common, number, totals[number], size, src_at, dst_at))
                        totals[number] += size
        return RankWants(wants, list(numbers), totals)

    def _copies(self, tensor: str) -> tuple[Copy, ...]:
        """Distinct source boxes of a tensor in order; for a box in two places (a tied output weight), the first."""
        found = self._known_copies.get(tensor)
        if found is None:
            by_box: dict[Box, Copy] = {}
            for copy in self._source.copies(tensor):
                by_box.setdefault(copy.box, copy)
            found = self._known_copies[tensor] = tuple(by_box[box] for box in sorted(by_box))
        return found


def _offset(inner: Box, outer: Box) -> Shape:
    return tuple(i[0] - o[0] for i, o in zip(inner, outer, strict=True))
