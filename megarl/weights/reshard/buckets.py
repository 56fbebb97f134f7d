"""Buckets: the messages of a plan, split identically on both sides, in one global order."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from megarl.core.errors import ConfigError, first_of
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.layout import Box, Layout, Shape
from megarl.weights.reshard.plan import Kind, Move, ReshardPlan

_ALIGNMENT = 16
"""Alignment in bytes; every dtype may be viewed at a multiple of it."""
HEADER = _ALIGNMENT
"""Bytes before a bucket's elements: its number in its channel, and the channel's code (int64)."""


class MessageChannel(NamedTuple):
    """A source rank and the destination ranks (ascending) that receive the same messages from it."""

    src: int
    dsts: tuple[int, ...]

    @property
    def code(self) -> int:
        """64-bit number that identifies the channel among its source rank's channels."""
        return int.from_bytes(hashlib.blake2b(repr(self.dsts).encode(), digest_size=8).digest(), "little", signed=True)


class BucketSlice(NamedTuple):
    """Elements ``box`` (inside the move's box, logical coordinates), row-major in the bucket from ``offset`` on."""

    move: Move
    box: Box
    offset: int
    dtype: torch.dtype

    @property
    def src_at(self) -> Shape:
        """First index in the source's local tensor."""
        return self._within(self.move.src_at)

    @property
    def dst_at(self) -> Shape:
        """First index in the destination's local tensor."""
        return self._within(self.move.dst_at)

    @property
    def end(self) -> int:
        """Byte of the bucket after the last."""
        return self.offset + boxes.volume(self.box) * self.dtype.itemsize

    def _within(self, at: Shape) -> Shape:
        return boxes.shifted(at, tuple(c[0] - m[0] for c, m in zip(self.box, self.move.box, strict=True)))


class Run(NamedTuple):
    """Slices that one copy writes: they follow each other in the bucket and in one local tensor of the destination.

    Slices of neighbouring experts do.
    """

    slices: tuple[BucketSlice, ...]
    start: int
    """Position of the first element in the local tensor in row-major order; unused for a single slice."""


class Bucket(NamedTuple):
    channel: MessageChannel
    nbytes: int
    runs: tuple[Run, ...]
    number: int = 0
    """Number within its channel."""

    @property
    def slices(self) -> tuple[BucketSlice, ...]:
        """Slices in the order of the message."""
        return tuple(slice_ for run in self.runs for slice_ in run.slices)

    def __str__(self) -> str:
        tensors = list(dict.fromkeys(slice_.move.tensor for slice_ in self.slices))
        held = f" ({first_of(tensors, 3)})" if tensors else ", the end of the transfer,"
        src, dsts = self.channel
        to = f"rank{'s' if len(dsts) > 1 else ''} {', '.join(map(str, dsts))}"
        return f"message {self.number}{held} from source rank {src} to destination {to}"


def wire_dtype(layout: Layout, tensor: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype for sending and digesting a logical tensor: its fixed dtype, or ``dtype``."""
    own = layout.dtype_of(tensor)
    return dtype if own is None else getattr(torch, own)  # type: ignore[no-any-return]


def bytes_of(layout: Layout, dtype: torch.dtype) -> int:
    """Total bytes of all ranks of a layout, each tensor in its wire dtype."""
    return sum(
        boxes.volume(piece.box) * len(ranks) * wire_dtype(layout, piece.tensor, dtype).itemsize
        for row in layout.rows
        for share, ranks in enumerate(row.owners.ranks)
        for piece in row.pieces(share)
    )


def buckets_of(plan: ReshardPlan, moves: Iterable[Move], capacity: int, dtype: torch.dtype) -> list[Bucket]:
    """Buckets of these moves (all moves of their channels), at most ``capacity`` bytes each, in global order.

    A destination is filled in windows: consecutive modules that fill at least one bucket. An engine has a second copy
    of every incomplete module, so only one window is open at a time. Windows from different pipeline stages alternate.
    Within a window, channels are interleaved by the distance between their ends, so that neighbouring buckets have
    different senders and receivers.
    """
    channels: dict[MessageChannel, list[Move]] = defaultdict(list)
    for move in moves:
        of_channel = channels[MessageChannel(move.src, move.dsts)]
        if not of_channel or of_channel[0].dst == move.dst:  # the other destinations' moves are the same
            of_channel.append(move)
    span = max(plan.source.num_ranks, plan.destination.num_ranks)
    turns = _Turns(plan, capacity, dtype)
    keyed = [
        ((turn, number, (channel.dsts[0] - channel.src) % span, channel), bucket)
        for channel, of_channel in channels.items()
        for turn, of_turn in turns.split(channel.dsts[0], of_channel).items()
        for number, bucket in enumerate(_pack(plan.destination, channel, of_turn, capacity, dtype))
    ]
    return [bucket for _, bucket in sorted(keyed, key=lambda item: item[0])]


def numbered(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Number the buckets of each channel; append each channel's end after all buckets."""
    counts: dict[MessageChannel, int] = defaultdict(int)
    found = []
    for bucket in buckets:
        found.append(bucket._replace(number=counts[bucket.channel]))
        counts[bucket.channel] += 1
    return found + [Bucket(channel, 0, (), count) for channel, count in sorted(counts.items())]


class _Turns:
    """Turn for filling each local tensor of a rank; equal for ranks with the same tensors."""

    def __init__(self, plan: ReshardPlan, capacity: int, dtype: torch.dtype) -> None:
        self.plan = plan
        self.capacity = capacity
        self.dtype = dtype
        self.known: dict[Kind, dict[str, int]] = {}

    def split(self, dst: int, moves: Iterable[Move]) -> dict[int, list[Move]]:
        """Turn -> its share of the moves to ``dst``."""
        kind = self.plan.destination.kind(dst)
        if kind not in self.known:
            windows = self._windows(dst)
            self.known[kind] = {local: turn for turn, window in enumerate(self._in_turn(windows)) for local in window}
        found: dict[int, list[Move]] = defaultdict(list)
        for move in moves:
            found[self.known[kind][move.dst_local]].append(move)
        return found

    def _windows(self, dst: int) -> list[tuple[str, list[str]]]:
        """Return (first logical tensor, local tensors) of each window."""
        layout, windows = self.plan.destination, list[tuple[str, list[str]]]()
        filled, module, seen = 0, "", set[str]()
        for row, share in layout.rows_of(dst):
            if row.local in seen:
                continue
            seen.add(row.local)
            before, module = module, row.local.rpartition(".")[0]
            if not windows or (filled >= self.capacity and module != before):
                windows.append((row.parts[0], []))
                filled = 0
            windows[-1][1].append(row.local)
            filled += prod(row.local_shape(share)) * wire_dtype(layout, row.parts[0], self.dtype).itemsize
        return windows

    def _in_turn(self, windows: list[tuple[str, list[str]]]) -> list[list[str]]:
        """Local tensors of each window, ordered so that the windows of every source stage are evenly spaced."""
        stages: dict[int, list[list[str]]] = defaultdict(list)
        for first, window in windows:
            stages[self.plan.source.rows_with[first][0].owners.ranks[0][0]].append(window)
        placed = [
            ((2 * number + 1) / len(of_stage), stage, number, window)
            for stage, of_stage in stages.items()
            for number, window in enumerate(of_stage)
        ]
        return [window for *_, window in sorted(placed, key=lambda place: place[:3])]


def _pack(
    layout: Layout, channel: MessageChannel, moves: Iterable[Move], capacity: int, dtype: torch.dtype
) -> Iterator[Bucket]:
    slices: list[BucketSlice] = []
    used = 0
    shapes = layout.local_shapes(channel.dsts[0])
    for move in moves:
        wire = wire_dtype(layout, move.tensor, dtype)
        if capacity < wire.itemsize:
            raise ConfigError(
                f"sync.bucket_bytes={capacity} holds no element of {wire}; set it to {wire.itemsize} or more"
            )
        for box in boxes.split(move.box, capacity // wire.itemsize):
            size = boxes.volume(box) * wire.itemsize
            start = used + -used % _ALIGNMENT
            if slices and start + size > capacity:
                yield Bucket(channel, used, _runs(slices, shapes))
                slices, start = [], 0
            slices.append(BucketSlice(move, box, start, wire))
            used = start + size
    if slices:
        yield Bucket(channel, used, _runs(slices, shapes))


def _runs(slices: Sequence[BucketSlice], shapes: Mapping[str, Shape]) -> tuple[Run, ...]:
    """Group slices into runs; ``shapes``: shapes of the destination's local tensors."""
    found = list[tuple[list[BucketSlice], int]]()
    after: tuple[str, torch.dtype, int, int] | None = None  # where another slice of the last run would begin
    for slice_ in slices:
        local, size = slice_.move.dst_local, boxes.volume(slice_.box)
        start, count = next(boxes.runs(shapes[local], boxes.at(slice_.dst_at, boxes.shape_of(slice_.box))))
        if count == size and after == (local, slice_.dtype, slice_.offset, start):
            found[-1][0].append(slice_)
        else:
            found.append(([slice_], start))
        after = (local, slice_.dtype, slice_.end, start + size) if count == size else None
    return tuple(Run(tuple(of_run), start) for of_run, start in found)
