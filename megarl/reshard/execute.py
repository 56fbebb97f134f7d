"""Executes a plan: pack slices into buckets, send, unpack. Nothing here knows what the tensors mean.

Both sides cut the plan into the same buckets and every rank works through its own in one global order. That order is why nothing
deadlocks: of all buckets under way, the first one's receiver waits for nothing else, and neither does its sender. A sender has at
most two buckets alive (it packs one while the other is on its way), a receiver one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from megarl.errors import ConfigError, PlanError, WeightSyncError
from megarl.ops import slice_digest
from megarl.reshard import boxes
from megarl.reshard.boxes import Box, Shape
from megarl.reshard.layout import Layout
from megarl.reshard.plan import Link, Move, ReshardPlan

Digests = dict[tuple[int, str], int]
"""(destination rank, logical tensor) -> 64-bit checksum of that rank's elements; partial sums of several senders add."""

_MODULUS = 1 << 64


class Work(Protocol):
    def wait(self) -> object: ...


class Transport(Protocol):
    """Carries flat contiguous tensors between rank spaces: messages of one link arrive in the order sent."""

    def isend(self, tensor: torch.Tensor, rank: int, /) -> Work:
        """Start sending to destination rank ``rank``; the tensor must not change until ``wait()`` has returned."""
        ...

    def recv(self, tensor: torch.Tensor, rank: int, /) -> None:
        """Fill the tensor with what source rank ``rank`` sends next."""
        ...


class Chunk(NamedTuple):
    """Elements ``box`` (within the move's box, in logical coordinates); they lie at ``offset`` in the bucket, row-major."""

    move: Move
    box: Box
    offset: int


class Bucket(NamedTuple):
    link: Link
    elements: int
    chunks: tuple[Chunk, ...]


def buckets_of(plan: ReshardPlan, links: Iterable[Link], capacity: int) -> list[Bucket]:
    """The buckets of these links, at most ``capacity`` elements each, in the global order.

    The order goes round: first bucket of every link, then the second; within a round links are interleaved by the distance
    between their ends, so that neighbouring buckets have different senders and receivers.
    """
    span = max(plan.source.num_ranks, plan.destination.num_ranks)
    keyed = [
        ((turn, (link.dst - link.src) % span, link.src, link.dst), bucket)
        for link in links
        for turn, bucket in enumerate(_pack(link, plan.links[link], capacity))
    ]
    return [bucket for _, bucket in sorted(keyed, key=lambda item: item[0])]


def _pack(link: Link, moves: Iterable[Move], capacity: int) -> Iterator[Bucket]:
    chunks: list[Chunk] = []
    used = 0
    for move in moves:
        for box in boxes.split(move.box, capacity):
            size = boxes.volume(box)
            if used + size > capacity:
                yield Bucket(link, used, tuple(chunks))
                chunks, used = [], 0
            chunks.append(Chunk(move, box, used))
            used += size
    if chunks:
        yield Bucket(link, used, tuple(chunks))


def send(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    device: torch.device | str = "cpu",
) -> Digests:
    """Send everything that source rank ``rank`` has to send, cast to ``dtype``.

    ``tensors``: local name -> tensor, as the source layout names and shapes them; any float dtype and device. ``device`` is
    where the buckets are. Returns the digests of what was sent, after the cast. Raises PlanError when ``tensors`` are not the
    layout's.
    """
    return _run(plan, rank, tensors, None, transport, _ignore, dtype, bucket_bytes, device)


def receive(
    plan: ReshardPlan,
    rank: int,
    write: Callable[[str], torch.Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    wrote: Callable[[str, int], None] = lambda local, numel: None,
    device: torch.device | str = "cpu",
) -> None:
    """Receive everything that destination rank ``rank`` needs, and zero its padding.

    ``write(local)`` gives the local tensor to write into (asked for anew for every chunk); ``wrote(local, numel)`` is called
    after each write: the numbers of one local tensor add up to its size.
    """
    _run(plan, rank, None, write, transport, wrote, dtype, bucket_bytes, device)


def exchange(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    write: Callable[[str], torch.Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    device: torch.device | str = "cpu",
) -> Digests:
    """Both sides at once, for a plan built with ``colocated=True``: what stays on the rank is copied, the rest is sent."""
    assert plan.colocated, "exchange needs a plan whose source and destination ranks are the same processes"
    return _run(plan, rank, tensors, write, transport, _ignore, dtype, bucket_bytes, device)


def _ignore(local: str, numel: int) -> None:
    """Nobody counts what was written."""


@torch.no_grad()
def _run(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor] | None,
    write: Callable[[str], torch.Tensor] | None,
    transport: Transport,
    wrote: Callable[[str, int], None],
    dtype: torch.dtype,
    bucket_bytes: int,
    device: torch.device | str,
) -> Digests:
    sources = tensors is not None and rank < plan.source.num_ranks
    receives = write is not None and rank < plan.destination.num_ranks
    links = [k for k in plan.links if (sources and k.src == rank) or (receives and k.dst == rank)]
    buckets = buckets_of(plan, links, _capacity(bucket_bytes, dtype))
    outgoing = (
        _Outgoing(plan, rank, tensors, transport, buckets, dtype, device) if sources and tensors is not None else None
    )
    incoming = _Incoming(plan, rank, write, wrote) if receives and write is not None else None
    inbox = torch.empty(_largest_arrival(plan, rank, buckets) if incoming else 0, dtype=dtype, device=device)
    for bucket in buckets:
        if plan.colocated and bucket.link.src == bucket.link.dst:
            assert outgoing is not None and incoming is not None
            incoming.unpack(bucket, outgoing.pack(bucket))
        elif outgoing is not None and bucket.link.src == rank:
            outgoing.send(bucket)
        elif incoming is not None:
            flat = inbox[: bucket.elements]
            transport.recv(flat, bucket.link.src)
            incoming.unpack(bucket, flat)
    if incoming is not None:
        incoming.finish()
    return outgoing.finish() if outgoing is not None else {}


def _largest_arrival(plan: ReshardPlan, rank: int, buckets: list[Bucket]) -> int:
    """Elements of the largest bucket that another process sends to destination rank ``rank``."""
    arriving = (b for b in buckets if b.link.dst == rank and not (plan.colocated and b.link.src == rank))
    return max((bucket.elements for bucket in arriving), default=0)


def _capacity(bucket_bytes: int, dtype: torch.dtype) -> int:
    if bucket_bytes < dtype.itemsize:
        raise ConfigError(
            f"sync.bucket_bytes={bucket_bytes} holds no element of {dtype}; set it to {dtype.itemsize} or more"
        )
    return bucket_bytes // dtype.itemsize


class _Outgoing:
    """The sending half: two buffers that take turns, and the digests of what went through them."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport,
        buckets: list[Bucket],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        _check_tensors(plan.source, rank, tensors)
        mine = [bucket.elements for bucket in buckets if bucket.link.src == rank]
        size, count = max(mine, default=0), min(len(mine), 2)
        self.buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(count)]
        self.works: list[Work | None] = [None] * count
        self.turn = 0
        self.shapes = plan.source.tensors
        self.tensors = tensors
        self.transport = transport
        self.digests: Digests = defaultdict(int)

    def pack(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's elements in the next free buffer."""
        self.turn = (self.turn + 1) % len(self.buffers)
        self._wait(self.turn)
        flat = self.buffers[self.turn][: bucket.elements]
        for chunk in bucket.chunks:
            view = _view(flat, chunk)
            view.copy_(_slice(self.tensors[chunk.move.src_local], chunk, chunk.move.src_at))
            key = (bucket.link.dst, chunk.move.tensor)
            partial = slice_digest(view, start=boxes.start_of(chunk.box), shape=self.shapes[chunk.move.tensor])
            self.digests[key] = (self.digests[key] + partial) % _MODULUS
        return flat

    def send(self, bucket: Bucket) -> None:
        flat = self.pack(bucket)
        self.works[self.turn] = self.transport.isend(flat, bucket.link.dst)

    def finish(self) -> Digests:
        for turn in range(len(self.works)):
            self._wait(turn)
        return dict(self.digests)

    def _wait(self, turn: int) -> None:
        work = self.works[turn]
        if work is not None:
            work.wait()
        self.works[turn] = None


class _Incoming:
    """The receiving half: puts chunks where they belong; zeroes a tensor's padding before its first chunk."""

    def __init__(
        self, plan: ReshardPlan, rank: int, write: Callable[[str], torch.Tensor], wrote: Callable[[str, int], None]
    ) -> None:
        self.write = write
        self.wrote = wrote
        self.padding: dict[str, list[Box]] = defaultdict(list)
        for pad in plan.destination.padding(rank):
            self.padding[pad.local].append(pad.box)

    def unpack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        for chunk in bucket.chunks:
            local = chunk.move.dst_local
            self._zero_padding(local)
            view = _view(flat, chunk)
            _slice(self.write(local), chunk, chunk.move.dst_at).copy_(view)
            self.wrote(local, view.numel())

    def finish(self) -> None:
        for local in list(self.padding):
            self._zero_padding(local)

    def _zero_padding(self, local: str) -> None:
        for box in self.padding.pop(local, ()):
            self.write(local)[boxes.index_of(boxes.start_of(box), boxes.shape_of(box))].zero_()
            self.wrote(local, boxes.volume(box))


def _view(flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return flat[chunk.offset : chunk.offset + boxes.volume(chunk.box)].view(boxes.shape_of(chunk.box))


def _slice(tensor: torch.Tensor, chunk: Chunk, at: Shape) -> torch.Tensor:
    """The chunk's elements within a local tensor where the whole move begins at ``at``."""
    start = boxes.shifted(at, tuple(c[0] - m[0] for c, m in zip(chunk.box, chunk.move.box, strict=True)))
    return tensor[boxes.index_of(start, boxes.shape_of(chunk.box))]


def _check_tensors(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    for local, shape in layout.local_shapes(rank).items():
        found = tuple(tensors[local].shape) if local in tensors else "no such tensor"
        if found != shape:
            raise PlanError(
                f"{local} on rank {rank} of {layout.name} must have shape {shape}, found {found}; build model and layout from "
                "the same config.json, grid and vocabulary padding"
            )


def digests_of(layout: Layout, rank: int, read: Callable[[str], torch.Tensor]) -> dict[str, int]:
    """Logical tensor -> digest of what ``rank`` holds of it now; ``read(local)`` gives the local tensor in the layout's shape."""
    digests: dict[str, int] = defaultdict(int)
    for piece in layout.pieces(rank):
        view = read(piece.local)[boxes.index_of(piece.at, boxes.shape_of(piece.box))]
        partial = slice_digest(view, start=boxes.start_of(piece.box), shape=layout.tensors[piece.tensor])
        digests[piece.tensor] = (digests[piece.tensor] + partial) % _MODULUS
    return dict(digests)


def merge(parts: Iterable[Digests]) -> Digests:
    """The digests of all senders together."""
    total: Digests = defaultdict(int)
    for part in parts:
        for key, value in part.items():
            total[key] = (total[key] + value) % _MODULUS
    return dict(total)


def compare(plan: ReshardPlan, sent: Digests, got: Digests) -> None:
    """Raise WeightSyncError naming every (logical tensor, destination tensor, ranks) whose two digests differ or lack one side."""
    wrong = [key for key in sorted(sent.keys() | got.keys()) if sent.get(key) != got.get(key)]
    if not wrong:
        return
    lines = []
    for dst, tensor in wrong[:8]:
        moves = [move for move in plan.moves if move.dst == dst and move.tensor == tensor]
        local = ", ".join(sorted({move.dst_local for move in moves})) or "no local tensor"
        sources = sorted({move.src for move in moves})
        values = " but ".join(
            f"{what} {'nothing' if (v := side.get((dst, tensor))) is None else format(v, '016x')}"
            for what, side in (("sent", sent), ("found", got))
        )
        lines.append(f"{tensor} in {local} on destination rank {dst}, from source ranks {sources}: digest {values}")
    more = f"\n... and {len(wrong) - len(lines)} more" if len(wrong) > len(lines) else ""
    raise WeightSyncError(
        "weights differ after the sync from what was sent; do not sample from this engine, sync again or restart it:\n"
        + "\n".join(lines)
        + more
    )
