"""A layout is a table: it maps boxes of logical tensors to positions in local ones.

A box is one half-open interval (lo, hi) per axis. Every function here is pure and independent of models.

It can be read by rank (:meth:`Layout.pieces`) and by tensor (:meth:`Layout.copies`). Both are computed on demand, so a
rank of a large job processes only its part.

A share is described along the one axis that tensor parallelism splits; all other axes are whole.

Sources: Megatron-Core 0.16.1 ``transformer/attention.py`` (``get_query_key_value_tensors``: heads interleaved per query
group), ``tensor_parallel/layers.py``; vLLM 0.32.0 ``model_executor/layers/linear.py`` (``QKVParallelLinear``),
``vocab_parallel_embedding.py`` (64 rows padding).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from megarl.core.errors import PlanError
from megarl.weights.architectures.table import ModelSizes, Op, Shard

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def whole(shape: Shape) -> Box:
    """The box of all elements of a tensor."""
    return tuple((0, extent) for extent in shape)


def shape_of(box: Box) -> Shape:
    """Extents of a box."""
    return tuple(hi - lo for lo, hi in box)


def start_of(box: Box) -> Shape:
    """First index of a box along each axis."""
    return tuple(lo for lo, _ in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Common elements, or ``None``."""
    out = []
    for (a_lo, a_hi), (b_lo, b_hi) in zip(a, b, strict=True):
        lo, hi = max(a_lo, b_lo), min(a_hi, b_hi)
        if lo >= hi:
            return None
        out.append((lo, hi))
    return tuple(out)


def contains(outer: Box, inner: Box) -> bool:
    """True if ``inner`` is inside ``outer``."""
    return len(outer) == len(inner) and all(o[0] <= i[0] <= i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def at(start: Shape, extents: Shape) -> Box:
    """Box of ``extents`` at ``start``. Extra leading axes of ``start`` are single indices (experts of a stack)."""
    lead = len(start) - len(extents)
    return tuple((s, s + (1 if axis < lead else extents[axis - lead])) for axis, s in enumerate(start))


def index_of(start: Shape, extents: Shape) -> tuple[int | slice, ...]:
    """Index for the view of shape ``extents`` at ``start``; leading single indices are dropped."""
    lead = len(start) - len(extents)
    return (*start[:lead], *(slice(s, s + n) for s, n in zip(start[lead:], extents, strict=True)))


def runs(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield (flat index of the first element, number of elements) of a box's contiguous runs, in row-major order."""
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = len(shape)
    while axis > 0 and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    axis = max(axis - 1, 0)  # the first axis along which a run may be shorter than the tensor
    count = prod(hi - lo for lo, hi in box[axis:])
    tail = sum(lo * step for (lo, _), step in zip(box[axis:], steps[axis:], strict=True))
    for index in itertools.product(*(range(lo, hi) for lo, hi in box[:axis])):
        yield sum(i * step for i, step in zip(index, steps, strict=False)) + tail, count


def shifted(start: Shape, by: Shape) -> Shape:
    """``start`` moved by an offset within a box; leading single indices stay unchanged."""
    lead = len(start) - len(by)
    return (*start[:lead], *(s + d for s, d in zip(start[lead:], by, strict=True)))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or ``None``. Sweeps along axis 0: disjoint rows cost O(n log n)."""
    order = sorted(range(len(boxes)), key=lambda i: boxes[i])
    active: list[int] = []
    for i in order:
        active = [j for j in active if boxes[j][0][1] > boxes[i][0][0]]
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return j, i
        active.append(i)
    return None


def split(box: Box, limit: int) -> Iterator[Box]:
    """Split a box, in row-major order, into boxes of at most ``limit`` elements: by rows, and within long rows."""
    if volume(box) <= limit:
        yield box
        return
    (lo, hi), rest = box[0], box[1:]
    row = volume(rest)
    if row <= limit:
        step = limit // row
        for a in range(lo, hi, step):
            yield ((a, min(a + step, hi)), *rest)
        return
    for a in range(lo, hi):
        for tail in split(rest, limit):
            yield ((a, a + 1), *tail)


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
        return at(self.at, shape_of(self.box))


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
        before, after = whole(self.shape[: self.axis]), whole(self.shape[self.axis + 1 :])
        head, tail = (*self.lead, *(0 for _ in before)), tuple(0 for _ in after)
        for part, lo, hi, at in self.splits[share].spans:
            yield Piece(self.parts[part], (*before, (lo, hi), *after), self.local, (*head, at, *tail))

    def padding(self, share: int) -> Padding | None:
        """Padding of a share; ``None`` without padding."""
        split = self.splits[share]
        if split.used == split.size:
            return None
        lead = tuple((i, i + 1) for i in self.lead)
        before, after = whole(self.shape[: self.axis]), whole(self.shape[self.axis + 1 :])
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
            for tensor in dict.fromkeys(row.parts):
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
                if not contains(whole(self.tensors[piece.tensor]), piece.box):
                    raise PlanError(
                        f"{where}: {piece} reaches outside {piece.tensor} of shape {self.tensors[piece.tensor]}"
                    )
                regions[row.local].append((piece.local_box, piece.tensor))
            padding = row.padding(share)
            if padding is not None:
                regions[row.local].append((padding.box, "padding"))
        for local, shape in shapes.items():
            check_tiling(f"{where}: {local}", whole(shape), regions[local])


def check_tiling(what: str, target: Box, regions: list[tuple[Box, str]]) -> None:
    """Raise PlanError unless the regions (box, description) cover ``target`` exactly once."""
    if len(regions) == 1 and regions[0][0] == target:
        return
    for box, source in regions:
        if not contains(target, box):
            raise PlanError(f"{what}{list(target)} is written outside its bounds, at {list(box)} by {source}")
    clash = first_overlap([box for box, _ in regions])
    if clash is not None:
        a, b = (regions[i] for i in clash)
        raise PlanError(f"{what} is written twice: {list(a[0])} by {a[1]} and {list(b[0])} by {b[1]}")
    covered = sum(volume(box) for box, _ in regions)
    if covered != volume(target):
        raise PlanError(
            f"{what} is not wholly written: {covered} of its {volume(target)} elements, from {[s for _, s in regions]}"
        )


@dataclass(frozen=True)
class Sharder:
    """Rules of one engine for splitting; ``vocab`` is the padded vocabulary."""

    sizes: ModelSizes
    vocab: int
    interleaved: bool
    """Interleave heads per query group (Megatron) instead of three blocks (vLLM)."""

    def splits(self, op: Op, shard: Shard, shapes: tuple[Shape, ...], ways: int) -> tuple[Split, ...]:
        """All ``ways`` shares of a tensor with parts of these shapes."""
        if shard is Shard.VOCAB:
            return tuple(_vocab(self.sizes.vocab, self.vocab, ways, k) for k in range(ways))
        if op in (Op.QKV, Op.QK, Op.GATED_QKV):
            cut = _query_groups if self.interleaved else _head_blocks
            rows = [shape[0] for shape in shapes]
            return tuple(cut(self.sizes.heads, rows, ways, k, gates=op is Op.GATED_QKV) for k in range(ways))
        if shard is Shard.FIRST:
            return tuple(_first(shapes[0][0], k) for k in range(ways))
        axis = shard_axis(shard, shapes[0])
        groups = self.sizes.delta_key_heads if op is Op.GROUPED else None
        return tuple(_even([shape[axis] for shape in shapes], ways, k, groups) for k in range(ways))


def shard_axis(shard: Shard, shape: Shape) -> int:
    return len(shape) - 1 if shard is Shard.ROW else 0


def _even(extents: list[int], ways: int, k: int, groups: int | None = None) -> Split:
    """Split every part into equal runs; the share's runs lie one after the other. With ``groups`` a part has as many
    equal runs, and a share has several groups, each with its run of every part."""
    groups = groups or ways
    spans: list[AxisSpan] = []
    at, own = 0, groups // ways
    for group in range(k * own, (k + 1) * own):
        for part, extent in enumerate(extents):
            each = extent // groups
            spans.append(AxisSpan(part, group * each, (group + 1) * each, at))
            at += each
    return Split(at, at, tuple(spans))


def _first(extent: int, k: int) -> Split:
    return Split(extent, 0, ()) if k else Split(extent, extent, (AxisSpan(0, 0, extent, 0),))


def _vocab(vocab: int, padded: int, ways: int, k: int) -> Split:
    each = padded // ways
    lo, hi = k * each, min((k + 1) * each, vocab)
    return Split(each, max(hi - lo, 0), (AxisSpan(0, lo, hi, 0),) if hi > lo else ())


def _query_groups(all_heads: int, extents: list[int], ways: int, k: int, *, gates: bool = False) -> Split:
    """Megatron: each query group is its query heads, (with ``gates``) their gates, its key head, then its value head.
    All groups together are split into equal runs of rows. With more shares than groups, a share has part of a group.

    In the logical tensor each query head has its gate behind it.

    Args:
        all_heads: Query heads of the model.
        extents: Rows of queries (and gates), of keys, and of values unless the keys are the values.
    """
    head = extents[0] // all_heads // (2 if gates else 1)
    groups = extents[1] // head
    heads, rows = all_heads // groups, sum(extents)
    each, group_rows = rows // ways, rows // groups
    lo, hi = k * each, (k + 1) * each
    spans: list[AxisSpan] = []
    for group in range(lo // group_rows, -(-hi // group_rows)):
        runs = [(0, group * heads * head, heads * head)]  # (part, first row of it, rows)
        if gates:
            runs = [(0, (2 * (group * heads + i) + gate) * head, head) for gate in (0, 1) for i in range(heads)]
        start = group * group_rows
        for part, first, extent in (*runs, *((part, group * head, head) for part in range(1, len(extents)))):
            a, b = max(start, lo), min(start + extent, hi)
            if a < b:
                spans.append(AxisSpan(part, first + a - start, first + b - start, a - lo))
            start += extent
    return Split(each, each, tuple(spans))


def _head_blocks(all_heads: int, extents: list[int], ways: int, k: int, *, gates: bool = False) -> Split:
    """vLLM: the share's query heads (each with its gate, if there are ``gates``), then its key heads, then its value
    heads. With more shares than key/value heads, each of these heads is on ``ways / kv_heads`` neighbouring shares.
    Arguments as of ``_query_groups``."""
    head = extents[0] // all_heads // (2 if gates else 1)
    queries, kv_heads = extents[0] // ways, extents[1] // head
    if ways >= kv_heads:
        keys, first = head, k // (ways // kv_heads)
    else:
        keys, first = extents[1] // ways, k
    return Split(
        queries + 2 * keys,
        queries + 2 * keys,
        (
            AxisSpan(0, k * queries, (k + 1) * queries, 0),
            AxisSpan(1, first * keys, (first + 1) * keys, queries),
            AxisSpan(2, first * keys, (first + 1) * keys, queries + keys),
        ),
    )
