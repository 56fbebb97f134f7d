"""A layout is a table: which pieces of which logical tensors lie where in which local tensor of which rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megarl.errors import PlanError
from megarl.reshard import boxes
from megarl.reshard.boxes import Box, Shape


@dataclass(frozen=True)
class Piece:
    """The elements ``box`` of a logical tensor; they lie in the local tensor ``local``, beginning at ``at``.

    ``at`` may have more axes than ``box``: the leading ones are then single indices (a stack of experts).
    """

    tensor: str
    box: Box
    local: str
    at: Shape

    @property
    def local_box(self) -> Box:
        return boxes.at(self.at, boxes.shape_of(self.box))


@dataclass(frozen=True)
class Padding:
    """Elements of a local tensor that belong to no logical tensor; a receiver sets them to zero."""

    local: str
    box: Box


@dataclass(frozen=True)
class Holding:
    """What one rank holds. Ranks with equal contents (data-parallel copies, engine replicas) share one Holding."""

    local_shapes: Mapping[str, Shape]
    pieces: tuple[Piece, ...]
    padding: tuple[Padding, ...] = ()


@dataclass(frozen=True)
class Layout:
    name: str
    """For messages, e.g. ``megatron tp=2 pp=1 dp=1``."""
    tensors: Mapping[str, Shape]
    """Logical tensors and their shapes."""
    holdings: tuple[Holding, ...]
    holding_of: tuple[int, ...]
    """rank -> index into ``holdings``."""

    @property
    def num_ranks(self) -> int:
        return len(self.holding_of)

    def holding(self, rank: int) -> Holding:
        return self.holdings[self.holding_of[rank]]

    def local_shapes(self, rank: int) -> Mapping[str, Shape]:
        """Local tensor name -> shape on this rank."""
        return self.holding(rank).local_shapes

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self.holding(rank).pieces

    def padding(self, rank: int) -> tuple[Padding, ...]:
        return self.holding(rank).padding

    def only(self, tensors: Collection[str]) -> Layout:
        """The part that concerns these logical tensors; local tensors without any of them are left out."""
        holdings = []
        for holding in self.holdings:
            pieces = tuple(piece for piece in holding.pieces if piece.tensor in tensors)
            kept = {piece.local for piece in pieces}
            shapes = {local: shape for local, shape in holding.local_shapes.items() if local in kept}
            holdings.append(Holding(shapes, pieces, tuple(pad for pad in holding.padding if pad.local in kept)))
        logical = {name: shape for name, shape in self.tensors.items() if name in tensors}
        return replace(self, tensors=logical, holdings=tuple(holdings))

    def check(self) -> None:
        """Raise PlanError unless the pieces and the padding of every rank tile every one of its local tensors exactly once."""
        for index, holding in enumerate(self.holdings):
            where = f"rank {self.holding_of.index(index)} of {self.name}"
            regions: dict[str, list[tuple[Box, str]]] = {name: [] for name in holding.local_shapes}
            for piece in holding.pieces:
                if not boxes.contains(boxes.whole(self.tensors[piece.tensor]), piece.box):
                    raise PlanError(
                        f"{where}: {piece} reaches outside {piece.tensor} of shape {self.tensors[piece.tensor]}"
                    )
                regions[piece.local].append((piece.local_box, piece.tensor))
            for pad in holding.padding:
                regions[pad.local].append((pad.box, "padding"))
            for local, shape in holding.local_shapes.items():
                check_tiling(f"{where}: {local}", boxes.whole(shape), regions[local])


def check_tiling(what: str, target: Box, regions: list[tuple[Box, str]]) -> None:
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
            f"{what} is not wholly written: {covered} of its {boxes.volume(target)} elements, from {[s for _, s in regions]}"
        )
