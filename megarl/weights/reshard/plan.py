"""A transfer plan: the elements that destination ranks need, and the source rank that sends each.

Pure geometry: chooses no sender.

Pure and deterministic: every process builds the same plan from the two layouts, without a device or a process group,
and ``fingerprint`` verifies it. Everything is computed on demand: for its moves a rank processes only its tensors.
Source and destination ranks are separate numberings; a transport maps them to processes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megarl.core.errors import PlanError
from megarl.weights.reshard.layout import (
    Box,
    Copy,
    Layout,
    Owners,
    Piece,
    Shape,
    check_tiling,
    intersect,
    shifted,
    volume,
)


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
                    if (common := intersect(copy.box, piece.box)) is not None
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
                        size = volume(common)
                        src_at = shifted(copy.at, _offset(common, copy.box))
                        dst_at = shifted(piece.at, _offset(common, piece.box))
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
    row = volume(rest)
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
                    src_at=shifted(want.src_at, by),
                    dst_at=shifted(want.dst_at, by),
                ),
                shares[number],
            )
            low = upper
        number += 1


class Move(NamedTuple):
    """Elements ``box`` of a logical tensor that go from ``src_local[src_at...]`` on rank ``src`` to
    ``dst_local[dst_at...]`` on ``dst``."""

    src: int
    dst: int
    tensor: str
    box: Box
    src_local: str
    src_at: Shape
    dst_local: str
    dst_at: Shape
    dsts: tuple[int, ...]
    """Ranks, ascending, that receive the same from ``src``: their moves are equal except for ``dst``."""


class RankPair(NamedTuple):
    """A (source rank, destination rank) pair."""

    src: int
    dst: int


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Plan that writes every element of every destination rank exactly once. Each method checks its part; :meth:`check`
    checks everything.

    Data-parallel copies of a source tensor share the sending evenly, and no rank contacts more of them than that needs.
    A source rank sends elements once for all replicas that receive them from it (``Move.dsts``).
    """

    source: Layout
    destination: Layout
    colocated: bool = False
    """Source rank r and destination rank r are the same process: their common elements are copied, not sent."""
    nearness: Callable[[int, int], int] | None = None
    """(source rank, destination rank) -> distance; the nearest copies are used. ``None``: all equal."""

    @cached_property
    def _wants(self) -> Wants:
        return Wants(self.source, self.destination)

    # ------------------------------------------------------------------ moves

    def moves_to(self, dst: int) -> Iterator[Move]:
        """Yield the moves to destination rank ``dst``, in the order of its pieces."""
        yield from (_move(want, dst, share) for want, share in self._shared(dst, self._wants.of_kind(dst)))

    def moves_from(self, src: int) -> Iterator[Move]:
        """Yield the moves from source rank ``src``, by destination rank."""
        mine = {piece.tensor for piece in self.source.pieces(src)}
        wants: dict[Kind, RankWants] = {}
        for dst in range(self.destination.num_ranks):
            kind = self.destination.kind(dst)
            if kind not in wants:
                wants[kind] = self._wants.of(dst, mine, sender=src)
            yield from (_move(want, dst, share) for want, share in self._shared(dst, wants[kind]) if share.src == src)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves by destination rank. Only for plans of a few ranks: a large job's plan has millions."""
        return tuple(move for dst in range(self.destination.num_ranks) for move in self.moves_to(dst))

    def check(self) -> None:
        """Raise PlanError unless all local tensors of every destination rank are written fully, exactly once."""
        seen: set[Kind] = set()
        for dst in range(self.destination.num_ranks):
            kind = self.destination.kind(dst)
            if kind not in seen:
                seen.add(kind)
                self.destination.check(dst)
                self._wants.of_kind(dst)

    def only(self, tensors: Callable[[str], bool]) -> ReshardPlan:
        """Return the plan for these logical tensors; a destination tensor is included with all its parts."""
        return replace(self, destination=self.destination.only(tensors))

    def receivers_from(self, src: int) -> list[int]:
        """Destination ranks that source rank ``src`` sends to, ascending."""
        return sorted({move.dst for move in self.moves_from(src)})

    def senders_to(self, dst: int) -> list[int]:
        """Source ranks that destination rank ``dst`` receives from, ascending."""
        return sorted({move.src for move in self.moves_to(dst)})

    # ------------------------------------------------------------------ how much

    def bytes_per_link(self, element_size: int) -> dict[RankPair, int]:
        """Bytes from each source rank to each destination rank, without moves within one process."""
        total: dict[RankPair, int] = {}
        for dst in range(self.destination.num_ranks):
            mine: dict[int, int] = defaultdict(int)
            for want, share in self._shared(dst, self._wants.of_kind(dst)):
                mine[share.src] += want.size
            for src, elements in mine.items():
                if not (self.colocated and src == dst):
                    total[RankPair(src, dst)] = elements * element_size
        return total

    def peak_extra_bytes(self, bucket_bytes: int, element_size: int = 4) -> int:
        """Most transfer-buffer bytes on any rank at a time: two buckets, or less if less is sent.

        A rank on both sides (``colocated``) has two to send and two to receive.
        """
        largest = max(self.bytes_per_link(element_size).values(), default=0)
        return (4 if self.colocated else 2) * min(bucket_bytes, largest)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over both layouts, which determine the moves: equal on two processes with the same plan."""
        digest = hashlib.sha256(repr(self.colocated).encode())
        for layout in (self.source, self.destination):
            owners: dict[Owners, int] = {}
            digest.update(repr((layout.num_ranks, sorted(layout.dtypes.items()))).encode())
            for row in layout.rows:
                if row.owners not in owners:
                    owners[row.owners] = len(owners)
                    digest.update(repr(row.owners.ranks).encode())
                line = row.local, row.parts, row.shape, row.axis, row.splits, owners[row.owners], row.stack, row.lead
                digest.update(repr(line).encode())
        return digest.hexdigest()

    # ------------------------------------------------------------------ who sends

    def _shared(self, dst: int, wants: RankWants) -> Iterator[tuple[Want, Share]]:
        """Yield the wants in order, split along axis 0 where two source ranks divide one, each with its share.

        Only wants with the same copies matter, so a source rank that computes its wants gets the same result.
        """
        shares = []
        for ranks, total in zip(wants.sets, wants.totals, strict=True):
            copies, takers = self._near(dst, ranks)
            shares.append(shares_of(dst, takers, copies, total))
        for want in wants.wants:
            yield from cut(want, shares[want.copies])

    def _near(self, dst: int, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the nearest of these source ranks, and the replicas of ``dst`` with the same nearest ranks."""
        replicas = self._replicas[dst]
        if self.nearness is None and not self.colocated:
            return ranks, replicas
        key = replicas[0], ranks
        if key not in self._known_near:
            by_copies: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for replica in replicas:
                by_copies[self._nearest(replica, ranks)].append(replica)
            self._known_near[key] = {
                replica: (copies, tuple(takers)) for copies, takers in by_copies.items() for replica in takers
            }
        return self._known_near[key][dst]

    @cached_property
    def _known_near(self) -> dict[tuple[int, tuple[int, ...]], dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Cache of ``_near``: (a kind's first rank, source ranks) -> destination rank -> result."""
        return {}

    def _nearest(self, dst: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if self.colocated and dst in ranks:
            return (dst,)
        if self.nearness is None:
            return ranks
        far = {rank: self.nearness(rank, dst) for rank in ranks}
        nearest = min(far.values())
        return tuple(rank for rank in ranks if far[rank] == nearest)

    @cached_property
    def _replicas(self) -> list[tuple[int, ...]]:
        """For each destination rank, all ranks with the same content, including itself."""
        members: dict[Kind, list[int]] = defaultdict(list)
        kinds = [self.destination.kind(rank) for rank in range(self.destination.num_ranks)]
        for rank, kind in enumerate(kinds):
            members[kind].append(rank)
        whole = {kind: tuple(ranks) for kind, ranks in members.items()}
        return [whole[kind] for kind in kinds]


def build_plan(
    source: Layout, destination: Layout, *, colocated: bool = False, nearness: Callable[[int, int], int] | None = None
) -> ReshardPlan:
    """Plan the moves that write every element of every destination rank exactly once.

    Raises PlanError naming a tensor that is missing or misshapen in the source; other checks run on demand
    (``ReshardPlan.check`` runs all).
    """
    for name, shape in destination.tensors.items():
        if source.tensors.get(name) != shape:
            raise PlanError(
                f"{name} has shape {shape} in {destination.name} and {source.tensors.get(name, 'no place')} in "
                f"{source.name}; both layouts must come from the same config.json"
            )
    return ReshardPlan(source, destination, colocated, nearness)


def _move(want: Want, dst: int, share: Share) -> Move:
    piece = want.piece
    return Move(
        share.src, dst, piece.tensor, want.box, want.copy.local, want.src_at, piece.local, want.dst_at, share.dsts
    )
