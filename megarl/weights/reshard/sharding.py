"""Splits of a fused tensor into shares: the meaning of ops and shards of ``megarl.weights.architectures`` per engine.

A share is described along the one axis that tensor parallelism splits; all other axes are whole.

Sources: Megatron-Core 0.16.1 ``transformer/attention.py`` (``get_query_key_value_tensors``: heads interleaved per query
group), ``tensor_parallel/layers.py``; vLLM 0.32.0 ``model_executor/layers/linear.py`` (``QKVParallelLinear``),
``vocab_parallel_embedding.py`` (64 rows padding).
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.architectures.table import ModelSizes, Op, Shard
from megarl.weights.reshard.boxes import Shape
from megarl.weights.reshard.layout import AxisSpan, Split


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
        if op is Op.QKV:
            cut = _query_groups if self.interleaved else _head_blocks
            return tuple(cut(self.sizes, ways, k) for k in range(ways))
        if shard is Shard.FIRST:
            return tuple(_first(shapes[0][0], k) for k in range(ways))
        axis = shard_axis(shard, shapes[0])
        return tuple(_even([shape[axis] for shape in shapes], ways, k) for k in range(ways))


def shard_axis(shard: Shard, shape: Shape) -> int:
    return len(shape) - 1 if shard is Shard.ROW else 0


def _even(extents: list[int], ways: int, k: int) -> Split:
    """Split every part into equal runs; concatenate the share's runs."""
    spans: list[AxisSpan] = []
    at = 0
    for part, extent in enumerate(extents):
        each = extent // ways
        spans.append(AxisSpan(part, k * each, (k + 1) * each, at))
        at += each
    return Split(at, at, tuple(spans))


def _first(extent: int, k: int) -> Split:
    return Split(extent, 0, ()) if k else Split(extent, extent, (AxisSpan(0, 0, extent, 0),))


def _vocab(vocab: int, padded: int, ways: int, k: int) -> Split:
    each = padded // ways
    lo, hi = k * each, min((k + 1) * each, vocab)
    return Split(each, max(hi - lo, 0), (AxisSpan(0, lo, hi, 0),) if hi > lo else ())


def _query_groups(sizes: ModelSizes, ways: int, k: int) -> Split:
    """Megatron: each query group is its query heads, then its key head, then its value head. All groups together are
    split into equal runs of rows. With more shares than groups, a share has part of a group."""
    head, queries = sizes.head, sizes.heads // sizes.kv_heads * sizes.head
    each = (sizes.q + 2 * sizes.kv) // ways
    lo, hi = k * each, (k + 1) * each
    spans: list[AxisSpan] = []
    group_rows = queries + 2 * head
    for group in range(lo // group_rows, -(-hi // group_rows)):
        start = group * group_rows
        for part, extent in enumerate((queries, head, head)):
            a, b = max(start, lo), min(start + extent, hi)
            if a < b:
                first = group * extent + a - start
                spans.append(AxisSpan(part, first, first + b - a, a - lo))
            start += extent
    return Split(each, each, tuple(spans))


def _head_blocks(sizes: ModelSizes, ways: int, k: int) -> Split:
    """vLLM: the share's query heads, then its key heads, then its value heads. With more shares than key/value heads,
    each of these heads is on ``ways / kv_heads`` neighbouring shares."""
    queries = sizes.q // ways
    if ways >= sizes.kv_heads:
        keys, first = sizes.head, k // (ways // sizes.kv_heads)
    else:
        keys, first = sizes.kv // ways, k
    return Split(
        queries + 2 * keys,
        queries + 2 * keys,
        (
            AxisSpan(0, k * queries, (k + 1) * queries, 0),
            AxisSpan(1, first * keys, (first + 1) * keys, queries),
            AxisSpan(2, first * keys, (first + 1) * keys, queries + keys),
        ),
    )
