"""A transfer plan: the intersection of the source ranks' elements with the destination ranks' needs.

Pure and deterministic: every process builds the same plan from the two layouts, without a device or a process group,
and ``fingerprint`` verifies it. Everything is computed on demand: for its moves a rank processes only its tensors.
Source and destination ranks are separate numberings; a transport maps them to processes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megarl.core.errors import PlanError
from megarl.weights.reshard.boxes import Box, Shape
from megarl.weights.reshard.copy_shares import Share, cut, shares_of
from megarl.weights.reshard.layout import Layout, Owners
from megarl.weights.reshard.wants import Kind, RankWants, Want, Wants


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
