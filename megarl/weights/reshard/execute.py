"""Execute a plan: pack slices into buckets, send, unpack. This module is independent of the tensors' meaning.

A bucket is packed once for all replicas. Both sides split the plan into the same buckets, and every rank processes its
buckets in one global order. This order prevents deadlock: the sender and receivers of the first bucket in flight wait
for nothing else. Each side has at most two buckets in memory. A sender packs one while the other is sent to all its
receivers; a receiver unpacks one while the next arrives.

A message begins with its bucket's number in its channel, and a channel ends with a message without elements. So a lost
or repeated message is reported with its tensors and ranks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Protocol, TypeVar

import torch

from megarl.core.errors import PlanError, WeightsDiffer, WeightSyncError
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import is_out_of_memory
from megarl.ops import digest_values, slice_digests
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.adapter_proof import ProvenTensors
from megarl.weights.reshard.adapters import Adapted
from megarl.weights.reshard.buckets import HEADER, Bucket, BucketSlice, buckets_of, numbered
from megarl.weights.reshard.layout import Box, Layout, Shape
from megarl.weights.reshard.plan import Move, ReshardPlan

SliceKey = tuple[str, str, Box]
"""(local tensor, logical tensor, elements) of a slice sent by one rank in a publication."""
SliceDigests = dict[SliceKey, int]
"""Slice -> its checksum."""
K = TypeVar("K")
Digests = dict[tuple[int, str], int]
"""(destination rank, logical tensor) -> 64-bit checksum of that rank's elements; senders' partial sums add up."""

_MODULUS = 1 << 64
_SYNC_FAILURE = (
    "weights differ after the sync from what was sent; nothing is sampled with them (docs/weight_sync.md, Proof)"
)
_PLANS = 4
"""Plans whose buckets a process keeps: engines near and far, all weights and those that training changes."""
NO_ROOM = "no memory for a bucket of"
"""Words of an error that smaller buckets may avoid; errors from an engine or another rank arrive as text."""


class Work(Protocol):
    def wait(self) -> object: ...


class Arrival(Protocol):
    """A message in flight to this rank."""

    def wait(self) -> torch.Tensor:
        """Wait for the message, uint8; valid until ``release``."""
        ...

    def release(self) -> None:
        """Mark the message as read: its memory may be reused."""
        ...


class Transport(Protocol):
    """Carries messages between source and destination ranks; messages of one link arrive in the order sent."""

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        """Allocate memory (uint8) to send messages from or receive them into."""
        ...

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        """Start sending part of an ``allocate``-d buffer to destination rank ``rank``. Do not change it before
        ``wait()`` returns."""
        ...

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        """Expect the next message of ``nbytes`` bytes from source rank ``rank``.

        ``spare()`` returns memory (uint8) for it if needed, large enough for any message of the link: gloo ends a
        process that receives a larger message than expected.
        """
        ...


@lru_cache(maxsize=_PLANS)
def buckets_from(plan: ReshardPlan, rank: int, capacity: int, dtype: torch.dtype) -> list[Bucket]:
    """Return the buckets that source rank ``rank`` sends, in order, of at most ``capacity`` bytes each."""
    return numbered(buckets_of(plan, plan.moves_from(rank), capacity, dtype))


@lru_cache(maxsize=_PLANS)
def buckets_to(plan: ReshardPlan, rank: int, capacity: int, dtype: torch.dtype) -> list[Bucket]:
    """Return the buckets that destination rank ``rank`` receives, in order."""
    return numbered(buckets_of(plan, plan.moves_to(rank), capacity, dtype))


def send(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    known: SliceDigests | None = None,
) -> Digests:
    """Send all elements of source rank ``rank``, cast to ``dtype`` or a tensor's fixed dtype. Return the digests of the
    sent elements, after the cast.

    Args:
        tensors: Local name -> tensor, named and shaped as in the source layout; any float dtype and device.
        known: Digests of slices already sent to others in this publication, to be reused; new digests are added.

    Raises PlanError if ``tensors`` do not match the layout.
    """
    _check_tensors(plan.source, rank, tensors)
    outgoing = Outgoing(plan, tensors, transport, buckets_from(plan, rank, bucket_bytes, dtype), known)
    for bucket in outgoing.buckets:
        outgoing.send(bucket, bucket.channel.dsts)
    return outgoing.finish()


def receive(
    plan: ReshardPlan,
    rank: int,
    write: Callable[[str], torch.Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    wrote: Callable[[str, int], None] = lambda local, numel: None,
) -> None:
    """Receive all elements of destination rank ``rank``, and zero its padding.

    ``write(local)`` returns the local tensor to write into (called for every run). ``wrote(local, numel)`` is called
    after each write; the numbers of one local tensor add up to its size.
    """
    buckets = buckets_to(plan, rank, bucket_bytes, dtype)
    incoming = Incoming(plan, rank, write, wrote, transport, buckets)
    for bucket in buckets:
        incoming.take(bucket)
    incoming.finish()


def exchange(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    write: Callable[[str], torch.Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Digests:
    """Run both sides in one process, for a plan with ``colocated=True``: copy elements within a rank, send others.

    A rank beyond the end of one side runs only the other side.
    """
    assert plan.colocated, "exchange needs a plan whose source and destination ranks are the same processes"
    moves: list[Move] = []
    if rank < plan.source.num_ranks:
        _check_tensors(plan.source, rank, tensors)
        moves += plan.moves_from(rank)
    if rank < plan.destination.num_ranks:
        moves += (move for move in plan.moves_to(rank) if move.src != rank)
    buckets = numbered(buckets_of(plan, moves, bucket_bytes, dtype))
    outgoing = Outgoing(plan, tensors, transport, [b for b in buckets if b.channel.src == rank])
    arriving = [b for b in buckets if b.channel.src != rank]
    incoming = Incoming(plan, rank, write, _ignore, transport, arriving)
    for bucket in buckets:
        if bucket.channel.src != rank:
            incoming.take(bucket)
            continue
        message = outgoing.send(bucket, [dst for dst in bucket.channel.dsts if dst != rank])
        if rank in bucket.channel.dsts:
            incoming.unpack(bucket, message[HEADER:])
    if rank < plan.destination.num_ranks:
        incoming.finish()
    return outgoing.finish()


def _ignore(local: str, numel: int) -> None:
    """Default of ``wrote``: do nothing."""


class Outgoing:
    """Sending side: two alternating buffers, and digests of the elements sent."""

    def __init__(
        self,
        plan: ReshardPlan,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport,
        buckets: Sequence[Bucket],
        known: SliceDigests | None = None,
    ) -> None:
        self.known: SliceDigests = {} if known is None else known
        self.buckets = buckets
        size = HEADER + max((bucket.nbytes for bucket in buckets), default=0)
        with memory_for(size):
            self.buffers = [transport.allocate(size) for _ in range(min(len(buckets), 2))]
        self.works: list[tuple[Bucket, list[Work]] | None] = [None] * len(self.buffers)
        self.turn = 0
        self.shapes = plan.source.tensors
        self.tensors = tensors
        self.transport = transport
        self.packed: list[Bucket] = []
        self.fresh: dict[SliceKey, None] = {}
        """Slices not in ``known``, in the order of ``fresh_digests``."""
        self.fresh_digests: list[torch.Tensor] = []
        """Digests of ``fresh``, int64 [slices] for each bucket, on the buckets' device; read by the host at the end."""

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> torch.Tensor:
        """Pack the bucket's message into the next free buffer."""
        heartbeat.beat()
        self.turn = (self.turn + 1) % len(self.buffers)
        self._wait(self.turn)
        flat = self.buffers[self.turn][: HEADER + bucket.nbytes]
        _header(flat).copy_(torch.tensor([bucket.number, bucket.channel.code], device="cpu"))
        asked = []
        for slice_ in bucket.slices:
            view = message_view(flat[HEADER:], slice_)
            view.copy_(local_view(self.tensors[slice_.move.src_local], slice_, slice_.src_at))
            key = _key(slice_)
            if key not in self.known and key not in self.fresh:
                self.fresh[key] = None
                asked.append((view, boxes.start_of(slice_.box), self.shapes[slice_.move.tensor]))
        if asked:
            self.fresh_digests.append(slice_digests(asked))
        self.packed.append(bucket)
        return flat

    def send(self, bucket: Bucket, dsts: Sequence[int]) -> torch.Tensor:
        """Start sending the bucket's message to these ranks; return the message."""
        message, works = self.pack(bucket), list[Work]()
        self.works[self.turn] = bucket, works
        for dst in dsts:
            works.append(self.transport.isend(message, dst))
        return message

    def finish(self) -> Digests:
        for turn in range(len(self.works)):
            self._wait(turn)
        if self.fresh_digests:
            self.known.update(zip(self.fresh, digest_values(torch.cat(self.fresh_digests)), strict=True))
        digests: Digests = defaultdict(int)
        for bucket in self.packed:
            for slice_ in bucket.slices:
                for dst in bucket.channel.dsts:
                    key = (dst, slice_.move.tensor)
                    digests[key] = (digests[key] + self.known[_key(slice_)]) % _MODULUS
        return dict(digests)

    def _wait(self, turn: int) -> None:
        sent, self.works[turn] = self.works[turn], None
        if sent is None:
            return
        bucket, works = sent
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"{bucket} was not taken: {error}") from error


class Incoming:
    """Receiving side: unpacks one bucket while the next is in flight; zeroes a tensor's padding first."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        write: Callable[[str], torch.Tensor],
        wrote: Callable[[str, int], None],
        transport: Transport,
        buckets: Sequence[Bucket],
    ) -> None:
        self.write = write
        self.wrote = wrote
        self.transport = transport
        self.size = HEADER + max((bucket.nbytes for bucket in buckets), default=0)
        self.buffers: list[torch.Tensor | None] = [None, None]
        self.expected: deque[Arrival] = deque()
        self.read: dict[tuple[int, int], int] = defaultdict(int)
        """(source rank, code of a channel) -> number of messages read."""
        self.ahead = iter(enumerate(buckets))
        self.padding: dict[str, list[Box]] = defaultdict(list)
        if rank < plan.destination.num_ranks:
            for pad in plan.destination.padding(rank):
                self.padding[pad.local].append(pad.box)
        self._expect()

    def take(self, bucket: Bucket) -> None:
        """Wait for the next bucket, in the order given at the start, and unpack it."""
        self._expect()
        arrival = self.expected.popleft()
        self.unpack(bucket, self._message(bucket, arrival)[HEADER:])
        heartbeat.beat()
        arrival.release()

    def _message(self, bucket: Bucket, arrival: Arrival) -> torch.Tensor:
        """Wait for the bucket's message and return it. Raises WeightSyncError."""
        try:
            message = arrival.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"{bucket} did not arrive: {error}") from error
        number, code = _header(message).tolist()
        key, src = bucket.channel.code, bucket.channel.src
        if (number, code) != (bucket.number, key):
            which, what = (
                "that" if code == key else "another",
                "came twice" if number < self.read[src, code] else "was lost",
            )
            raise WeightSyncError(
                f"{bucket} was expected, message {number} of {which} channel arrived: one {what}; sync again"
            )
        self.read[src, code] += 1
        return message

    @torch.no_grad()
    def unpack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        for run in bucket.runs:
            first = run.slices[0]
            local = first.move.dst_local
            self._zero_padding(local)
            target = self.write(local)
            values = flat[first.offset : run.slices[-1].end].view(first.dtype)
            if len(run.slices) > 1 and target.is_contiguous():
                target.view(-1)[run.start : run.start + values.numel()].copy_(values)
            else:
                for slice_ in run.slices:
                    local_view(target, slice_, slice_.dst_at).copy_(message_view(flat, slice_))
            self.wrote(local, values.numel())

    @torch.no_grad()
    def finish(self) -> None:
        for local in list(self.padding):
            self._zero_padding(local)

    def _expect(self) -> None:
        number, bucket = next(self.ahead, (0, None))
        if bucket is not None:
            self.expected.append(
                self.transport.irecv(HEADER + bucket.nbytes, bucket.channel.src, lambda: self._buffer(number % 2))
            )

    def _buffer(self, which: int) -> torch.Tensor:
        buffer = self.buffers[which]
        if buffer is None:
            with memory_for(self.size):
                buffer = self.buffers[which] = self.transport.allocate(self.size)
        return buffer

    def _zero_padding(self, local: str) -> None:
        for box in self.padding.pop(local, ()):
            self.write(local)[boxes.index_of(boxes.start_of(box), boxes.shape_of(box))].zero_()
            self.wrote(local, boxes.volume(box))


@contextmanager
def memory_for(nbytes: int) -> Iterator[None]:
    """Raise a WeightSyncError with ``NO_ROOM`` if allocating a bucket in the body runs out of memory."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise WeightSyncError(f"{NO_ROOM} {nbytes} bytes: {error}") from error


def _key(slice_: BucketSlice) -> SliceKey:
    return slice_.move.src_local, slice_.move.tensor, slice_.box


def _header(message: torch.Tensor) -> torch.Tensor:
    """View of the message's header, int64 [2]: number of the bucket, code of its channel."""
    return message[:HEADER].view(torch.int64)


def message_view(flat: torch.Tensor, slice_: BucketSlice) -> torch.Tensor:
    """View of the slice's elements in its message (without the header)."""
    return flat[slice_.offset : slice_.end].view(slice_.dtype).view(boxes.shape_of(slice_.box))


def local_view(tensor: torch.Tensor, slice_: BucketSlice, at: Shape) -> torch.Tensor:
    """View of the slice's elements in a local tensor, where they begin at ``at``."""
    return tensor[boxes.index_of(at, boxes.shape_of(slice_.box))]


def _check_tensors(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    if isinstance(tensors, Adapted | ProvenTensors):
        tensors = tensors.unmerged
    for local, shape in layout.local_shapes(rank).items():
        found = tuple(tensors[local].shape) if local in tensors else "no such tensor"
        if found != shape:
            raise PlanError(
                f"{local} on rank {rank} of {layout.name} must have shape {shape}, found {found}; build model and "
                "layout from the same config.json, grid and vocabulary padding"
            )


def zero_padded(
    layout: Layout, rank: int, read: Callable[[str], torch.Tensor]
) -> tuple[Callable[[str], torch.Tensor], Callable[[], None]]:
    """Check the padding of local tensors, which no digest covers, as they are read.

    Returns:
        ``read`` with the check, which raises WeightsDiffer for non-zero padding; a function to check unread tensors.
    """
    padding: dict[str, list[Box]] = defaultdict(list)
    for pad in layout.padding(rank):
        padding[pad.local].append(pad.box)

    def checked(local: str) -> torch.Tensor:
        value = read(local)
        for box in padding.pop(local, ()):
            if value[boxes.index_of(boxes.start_of(box), boxes.shape_of(box))].any():
                raise WeightsDiffer(f"the padding of {local} at {box} is not zero after the sync: it was not written")
        return value

    def check_rest() -> None:
        for local in list(padding):
            checked(local)

    return checked, check_rest


def digests_of(layout: Layout, rank: int, read: Callable[[str], torch.Tensor]) -> dict[str, int]:
    """Logical tensor -> digest of its elements on ``rank``; ``read(local)``: local tensor in the layout's shape."""
    return merge({tensor: digest} for tensor, _, digest in piece_digests(layout, rank, read))


def piece_digests(layout: Layout, rank: int, read: Callable[[str], torch.Tensor]) -> list[tuple[str, Box, int]]:
    """Return (logical tensor, elements, digest) of every piece of a rank. Digests of boxes that tile a tensor add up to
    the tensor's digest.

    Args:
        read: Returns a local tensor, by its name in the model, in the layout's shape. Only one is in memory at a time;
            pieces of the same tensor are consecutive.
    """
    found, digests = list[tuple[str, Box]](), list[torch.Tensor]()
    for local, pieces in groupby(layout.pieces(rank), key=attrgetter("local")):
        tensor, asked = read(local), []
        for piece in pieces:
            view = tensor[boxes.index_of(piece.at, boxes.shape_of(piece.box))]
            asked.append((view, boxes.start_of(piece.box), layout.tensors[piece.tensor]))
            found.append((piece.tensor, piece.box))
        digests.append(slice_digests(asked))
    values = digest_values(torch.cat(digests)) if digests else []  # the only point where the host waits for the device
    return [(*piece, value) for piece, value in zip(found, values, strict=True)]


def fold(digests: Mapping[str, int]) -> int:
    """Combine the digests of many tensors into one: the sum of each times an odd number made from the tensor's name.

    A difference in one tensor always changes it. Folds of partial digests add up to the fold of the full digests.
    """
    return sum(_factor(tensor) * digest for tensor, digest in digests.items()) % _MODULUS


def _factor(tensor: str) -> int:
    return int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8).digest(), "little") | 1


def folds_of(sent: Digests) -> dict[int, int]:
    """Destination rank -> fold of the digests of elements that one rank sent to it."""
    by_rank: dict[int, dict[str, int]] = defaultdict(dict)
    for (rank, tensor), digest in sent.items():
        by_rank[rank][tensor] = digest
    return {rank: fold(digests) for rank, digests in by_rank.items()}


def merge(parts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    """Sum digests, or folds, over all senders."""
    total: dict[K, int] = defaultdict(int)
    for part in parts:
        for key, value in part.items():
            total[key] = (total[key] + value) % _MODULUS
    return dict(total)


def compare(plan: ReshardPlan, sent: Digests, got: Digests, failure: str = _SYNC_FAILURE) -> None:
    """Raise WeightsDiffer naming every (logical tensor, destination tensor, ranks) with different or missing digests.

    ``failure``: beginning of the message.
    """
    wrong = [key for key in sorted(sent.keys() | got.keys()) if sent.get(key) != got.get(key)]
    if not wrong:
        return
    lines = []
    for dst, tensor in wrong[:8]:
        moves = [m for m in plan.moves_to(dst) if m.tensor == tensor] if dst < plan.destination.num_ranks else []
        local = ", ".join(sorted({move.dst_local for move in moves})) or "no local tensor"
        sources = sorted({move.src for move in moves})
        values = " but ".join(
            f"{what} {'nothing' if (v := side.get((dst, tensor))) is None else format(v, '016x')}"
            for what, side in (("sent", sent), ("found", got))
        )
        lines.append(f"{tensor} in {local} on destination rank {dst}, from source ranks {sources}: digest {values}")
    more = f"\n... and {len(wrong) - len(lines)} more" if len(wrong) > len(lines) else ""
    raise WeightsDiffer(f"{failure}:\n" + "\n".join(lines) + more)
