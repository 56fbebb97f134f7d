"""A layout is a table: it maps pieces of logical tensors to positions in local tensors of ranks.

It can be read by rank (:meth:`Layout.pieces`) and by tensor (:meth:`Layout.copies`). Both are computed on demand, so a
rank of a large job processes only its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megarl.core.errors import PlanError
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box, Shape


class Piece(NamedTuple):
    """Elements ``box`` of a logical tensor, stored in the local tensor ``local`` from ``at`` on.

    ``at`` may have more axes than ``box``: the leading ones are then single indices (a stack of experts or layers).
    """

    tensor: str
    box: Box
    local: str
    at: Shape

    @property
    def local_box(self) -> Box:
        return boxes.at(self.at, boxes.shape_of(self.box))


class Padding(NamedTuple):
    """Elements of a local tensor outside all logical tensors; a receiver sets them to zero."""

    local: str
    box: Box


class Copy(NamedTuple):
    """Ranks (ascending) with ``box`` of a logical tensor at the same place of the same local tensor."""

    box: Box
    local: str
    at: Shape
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Owners:
    """Owners of the shares of a row: ``ranks[k]`` (ascending) all have share k. Rows of one stage share one Owners."""

    ranks: tuple[tuple[int, ...], ...]

    @cached_property
    def share_of(self) -> dict[int, int]:
        """Rank -> share."""
        return {rank: share for share, ranks in enumerate(self.ranks) for rank in ranks}


class AxisSpan(NamedTuple):
    """Elements [lo, hi) along the split axis of a row's ``part``-th logical tensor, stored locally from ``at`` on."""

    part: int
    lo: int
    hi: int
    at: int


class Split(NamedTuple):
    """One share along the split axis: ``size`` local elements; those from ``used`` on are padding."""

    size: int
    used: int
    spans: tuple[AxisSpan, ...]


class LayoutRow(NamedTuple):
    """One fused local tensor (or one slice of a stack), as on every rank with a share of it."""

    local: str
    parts: tuple[str, ...]
    """Logical tensors, with equal shapes except along the split axis."""
    shape: Shape
    """Shape of the first part."""
    axis: int
    """The split axis."""
    splits: tuple[Split, ...]
    """Split of each share."""
    owners: Owners
    stack: Shape = ()
    """Extents of the local tensor's leading axes (layers, experts) on every rank that has it."""
    lead: Shape = ()
    """This row's index in ``stack``."""

    def local_shape(self, share: int) -> Shape:
        """Shape of a share's local tensor."""
        cut = self.splits[share].size
        return (*self.stack, *self.shape[: self.axis], cut, *self.shape[self.axis + 1 :])

    def pieces(self, share: int) -> Iterable[Piece]:
        """Pieces of logical tensors in a share."""
        before, after = boxes.whole(self.shape[: self.axis]), boxes.whole(self.shape[self.axis + 1 :])
        head, tail = (*self.lead, *(0 for _ in before)), tuple(0 for _ in after)
        for part, lo, hi, at in self.splits[share].spans:
            yield Piece(self.parts[part], (*before, (lo, hi), *after), self.local, (*head, at, *tail))

    def padding(self, share: int) -> Padding | None:
        """Padding of a share; ``None`` without padding."""
        split = self.splits[share]
        if split.used == split.size:
            return None
        lead = tuple((i, i + 1) for i in self.lead)
        before, after = boxes.whole(self.shape[: self.axis]), boxes.whole(self.shape[self.axis + 1 :])
        return Padding(self.local, (*lead, *before, (split.used, split.size), *after))


class Layout:
    """Rows and their owners.

    Args:
        name: For messages, e.g. ``megatron tp=2 pp=1 dp=1``.
        tensors: Logical tensors and their shapes.
        num_ranks: Ranks of this side.
        rows: In model order; a rank's local tensors and pieces have this order.
        dtypes: Logical tensors with a fixed dtype, independent of the model's.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Shape],
        num_ranks: int,
        rows: Iterable[LayoutRow],
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.tensors = dict(tensors)
        self.num_ranks = num_ranks
        self.rows = tuple(rows)
        self.dtypes = dict(dtypes or {})

    def dtype_of(self, tensor: str) -> str | None:
        """Fixed dtype of this logical tensor; ``None``: the model's dtype."""
        return self.dtypes.get(tensor)

    @cached_property
    def _numbered(self) -> dict[Owners, list[tuple[int, LayoutRow]]]:
        rows: dict[Owners, list[tuple[int, LayoutRow]]] = defaultdict(list)
        for number, row in enumerate(self.rows):
            rows[row.owners].append((number, row))
        return rows

    @cached_property
    def _owners_of(self) -> list[list[Owners]]:
        found: list[list[Owners]] = [[] for _ in range(self.num_ranks)]
        for owners in self._numbered:
            for rank in owners.share_of:
                found[rank].append(owners)
        return found

    def kind(self, rank: int) -> tuple[tuple[Owners, int], ...]:
        """Equal for ranks with the same content (data-parallel copies, engine replicas)."""
        return tuple((owners, owners.share_of[rank]) for owners in self._owners_of[rank])

    def rows_of(self, rank: int) -> list[tuple[LayoutRow, int]]:
        """Return (row, this rank's share of it) in model order."""
        found = [
            (number, row, owners.share_of[rank])
            for owners in self._owners_of[rank]
            for number, row in self._numbered[owners]
        ]
        found.sort(key=lambda item: item[0])
        return [(row, share) for _, row, share in found]

    def local_shapes(self, rank: int) -> dict[str, Shape]:
        """Local tensor name -> shape on this rank."""
        return {row.local: row.local_shape(share) for row, share in self.rows_of(rank)}

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Pieces of a rank."""
        return tuple(piece for row, share in self.rows_of(rank) for piece in row.pieces(share))

    def padding(self, rank: int) -> tuple[Padding, ...]:
        """Padding of a rank."""
        found = (row.padding(share) for row, share in self.rows_of(rank))
        return tuple(padding for padding in found if padding is not None)

    @cached_property
    def rows_with(self) -> dict[str, list[LayoutRow]]:
        """Logical tensor -> rows with parts of it."""
        found: dict[str, list[LayoutRow]] = defaultdict(list)
        for row in self.rows:
            for tensor in row.parts:
                found[tensor].append(row)
        return found

    def copies(self, tensor: str) -> tuple[Copy, ...]:
        """All places and ranks with elements of a logical tensor."""
        found: dict[tuple[Box, str, Shape], list[int]] = {}
        for row in self.rows_with.get(tensor, ()):
            for share, ranks in enumerate(row.owners.ranks):
                for piece in row.pieces(share):
                    if piece.tensor == tensor:
                        found.setdefault((piece.box, piece.local, piece.at), []).extend(ranks)
        return tuple(Copy(*key, tuple(sorted(ranks))) for key, ranks in found.items())

    def only(self, tensors: Callable[[str], bool]) -> Layout:
        """Return the layout of the logical tensors that ``tensors`` accepts; rows are kept with all their parts."""
        return self.only_rows([row for row in self.rows if any(map(tensors, row.parts))])

    def only_rows(self, rows: Sequence[LayoutRow]) -> Layout:
        """Return the layout of only these rows."""
        kept = {tensor: self.tensors[tensor] for row in rows for tensor in row.parts}
        return Layout(self.name, kept, self.num_ranks, rows, self.dtypes)

    def check(self, rank: int) -> None:
        """Raise PlanError unless this rank's pieces and padding tile each of its local tensors exactly once."""
        where = f"rank {rank} of {self.name}"
        regions: dict[str, list[tuple[Box, str]]] = defaultdict(list)
        shapes: dict[str, Shape] = {}
        for row, share in self.rows_of(rank):
            shape = row.local_shape(share)
            if shapes.setdefault(row.local, shape) != shape:
                raise PlanError(f"{where}: {row.local} would have shape {shapes[row.local]} and {shape}")
            for piece in row.pieces(share):
                if not boxes.contains(boxes.whole(self.tensors[piece.tensor]), piece.box):
                    raise PlanError(
                        f"{where}: {piece} reaches outside {piece.tensor} of shape {self.tensors[piece.tensor]}"
                    )
                regions[row.local].append((piece.local_box, piece.tensor))
            padding = row.padding(share)
            if padding is not None:
                regions[row.local].append((padding.box, "padding"))
        for local, shape in shapes.items():
            check_tiling(f"{where}: {local}", boxes.whole(shape), regions[local])


def check_tiling(what: str, target: Box, regions: list[tuple[Box, str]]) -> None:
    """Raise PlanError unless the regions (box, description) cover ``target`` exactly once."""
    if len(regions) == 1 and regions[0][0] == target:
        return
    for box, source in regions:
        if not boxes.contains(target, box):
            raise PlanError(f"{what}{list(target)} is written outside its bounds, at {list(box)} by {source}")
    clash = boxes.first_overlap([box for box, _ in regions])
    if clash is not None:
        a, b = (regions[i] for i in clash)
        raise PlanError(f"{what} is written twice: {list(a[0])} by {a[1]} and {list(b[0])} by {b[1]}")
    covered = sum(boxes.volume(box) for box, _ in regions)
    if covered != boxes.volume(target):
        raise PlanError(
            f"{what} is not wholly written: {covered} of its {boxes.volume(target)} elements, from "
            f"{[s for _, s in regions]}"
        )
