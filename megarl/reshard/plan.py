"""A transfer is a plan: the intersection of what the source ranks hold with what the destination ranks need.

Pure and deterministic: every process builds the same plan from the two layouts, without a device or a process group, and
``fingerprint`` proves it. Source and destination ranks are two rank spaces; a transport maps them to processes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megarl.errors import PlanError
from megarl.reshard import boxes
from megarl.reshard.boxes import Box, Shape
from megarl.reshard.layout import Layout, Piece, check_tiling


class Move(NamedTuple):
    """Elements ``box`` of a logical tensor go from ``src_local[src_at...]`` on rank ``src`` to ``dst_local[dst_at...]`` on ``dst``."""

    src: int
    dst: int
    tensor: str
    box: Box
    src_local: str
    src_at: Shape
    dst_local: str
    dst_at: Shape


class Link(NamedTuple):
    """A (source rank, destination rank) pair."""

    src: int
    dst: int


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    source: Layout
    destination: Layout
    moves: tuple[Move, ...]
    """By destination rank; within one, in the order of its pieces (model order)."""
    colocated: bool = False
    """Source rank r and destination rank r are the same process."""

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over moves, local shapes and padding: equal on two processes exactly when they planned the same."""
        digest = hashlib.sha256()
        for move in self.moves:
            digest.update(repr(tuple(move)).encode())
        for layout in (self.source, self.destination):
            holdings = [
                (sorted(h.local_shapes.items()), [(p.local, p.box) for p in h.padding]) for h in layout.holdings
            ]
            digest.update(repr((holdings, layout.holding_of, self.colocated)).encode())
        return digest.hexdigest()

    @cached_property
    def links(self) -> dict[Link, tuple[Move, ...]]:
        """The moves of each (source rank, destination rank), in plan order."""
        links: dict[Link, list[Move]] = defaultdict(list)
        for move in self.moves:
            links[Link(move.src, move.dst)].append(move)
        return {link: tuple(moves) for link, moves in links.items()}

    def only(self, tensors: Collection[str]) -> ReshardPlan:
        """The part of the plan that concerns these logical tensors: a destination tensor goes with all that is in it."""
        moves = tuple(move for move in self.moves if move.tensor in tensors)
        return replace(self, destination=self.destination.only(tensors), moves=moves)

    def bytes_per_link(self, element_size: int) -> dict[Link, int]:
        """Bytes that go from each source rank to each destination rank; moves within one process are not counted."""
        return {
            link: sum(boxes.volume(move.box) for move in moves) * element_size
            for link, moves in self.links.items()
            if not (self.colocated and link.src == link.dst)
        }

    def peak_extra_bytes(self, bucket_bytes: int, element_size: int = 4) -> int:
        """Most transfer-buffer bytes that any one rank has at one time: two buckets, or less where less is sent.

        A rank that is source and destination at once (``colocated``) has two to send and one to receive.
        """
        largest = max(self.bytes_per_link(element_size).values(), default=0)
        return (3 if self.colocated else 2) * min(bucket_bytes, largest)


class _Copy(NamedTuple):
    """Where one rank keeps a source box."""

    rank: int
    local: str
    at: Shape


def build_plan(source: Layout, destination: Layout, *, colocated: bool = False) -> ReshardPlan:
    """Plan the moves that write every element of every destination rank exactly once.

    Of several ranks that hold the same source piece the least loaded one so far sends it; with ``colocated`` a rank that has
    what it needs copies it locally. Raises PlanError naming the tensor that would be written twice, in part, or not at all.
    """
    for name, shape in destination.tensors.items():
        if source.tensors.get(name) != shape:
            raise PlanError(
                f"{name} has shape {shape} in {destination.name} and {source.tensors.get(name, 'no place')} in {source.name}; "
                "both layouts must come from the same config.json"
            )
    destination.check()
    index = _index(source)
    wanted = [_overlaps(destination, h, index, source.name) for h in range(len(destination.holdings))]
    load = [0] * source.num_ranks
    moves: list[Move] = []
    for dst in range(destination.num_ranks):
        for piece, source_box, box in wanted[destination.holding_of[dst]]:
            copies = index[piece.tensor][source_box]
            copy = _choose(copies, load, dst if colocated else None)
            if not (colocated and copy.rank == dst):
                load[copy.rank] += boxes.volume(box)
            src_at = boxes.shifted(copy.at, _offset(box, source_box))
            dst_at = boxes.shifted(piece.at, _offset(box, piece.box))
            moves.append(Move(copy.rank, dst, piece.tensor, box, copy.local, src_at, piece.local, dst_at))
    return ReshardPlan(source, destination, tuple(moves), colocated)


def _offset(inner: Box, outer: Box) -> Shape:
    return tuple(i[0] - o[0] for i, o in zip(inner, outer, strict=True))


def _index(source: Layout) -> dict[str, dict[Box, list[_Copy]]]:
    """tensor -> distinct source box -> the ranks that hold it, one copy each."""
    ranks: list[list[int]] = [[] for _ in source.holdings]
    for rank, which in enumerate(source.holding_of):
        ranks[which].append(rank)
    index: dict[str, dict[Box, list[_Copy]]] = defaultdict(dict)
    for which, contents in enumerate(source.holdings):
        seen: set[tuple[str, Box]] = set()
        for piece in contents.pieces:
            if (piece.tensor, piece.box) in seen:
                continue
            seen.add((piece.tensor, piece.box))
            copies = index[piece.tensor].setdefault(piece.box, [])
            copies += [_Copy(rank, piece.local, piece.at) for rank in ranks[which]]
    return index


def _overlaps(
    destination: Layout, which: int, index: dict[str, dict[Box, list[_Copy]]], source_name: str
) -> list[tuple[Piece, Box, Box]]:
    """(destination piece, source box, their common box) for one holding; checks that the common boxes tile each piece."""
    out: list[tuple[Piece, Box, Box]] = []
    rank = destination.holding_of.index(which)
    for piece in destination.holdings[which].pieces:
        hits = [(s, c) for s in sorted(index.get(piece.tensor, {})) if (c := boxes.intersect(s, piece.box)) is not None]
        check_tiling(
            f"{piece.tensor} of {source_name} into {piece.local} on rank {rank} of {destination.name}",
            piece.box,
            [(common, f"source piece {list(box)}") for box, common in hits],
        )
        out += [(piece, box, common) for box, common in hits]
    return out


def _choose(copies: list[_Copy], load: list[int], prefer: int | None) -> _Copy:
    if prefer is not None:
        for copy in copies:
            if copy.rank == prefer:
                return copy
    return min(copies, key=lambda copy: (load[copy.rank], copy.rank))
