"""The layouts that exist: Megatron-Core's grid, vLLM's fused shards, and plain HF files.

Here, once, is what the ops and shards of ``megarl.architectures`` mean for each engine. A :class:`Split` describes one rank's
share of a row along the one axis that tensor parallelism cuts; everything else is whole.

Sources: Megatron-Core 0.16.1 ``transformer/attention.py`` (``get_query_key_value_tensors``: heads interleaved per query group),
``tensor_parallel/layers.py``; vLLM 0.32.0 ``model_executor/layers/linear.py`` (``QKVParallelLinear``),
``vocab_parallel_embedding.py`` (64 rows padding).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarl.architectures import HFConfig, ModelSizes, architecture
from megarl.architectures.table import Op, Param, Shard, Stage
from megarl.errors import ConfigError
from megarl.reshard.boxes import Shape, whole
from megarl.reshard.layout import Holding, Layout, Padding, Piece

__all__ = [
    "Holding",
    "Layout",
    "MegatronGrid",
    "Padding",
    "Piece",
    "hf_layout",
    "megatron_layout",
    "padded_vocab_size",
    "stage_layers",
    "vllm_layout",
]

VOCAB_MULTIPLE = 64
"""Rows of the embedding on every Megatron rank are a multiple of this."""
VLLM_VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE: the whole embedding is a multiple of this, whatever the tensor parallel size."""

TransformerImpl = Literal["local", "transformer_engine"]


@dataclass(frozen=True)
class MegatronGrid:
    """Rank order is Megatron's default ``tp-cp-ep-dp-pp``: rank = tp_rank + tp * (dp_rank + dp * pp_rank)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} dp={self.dp}"


class Segment(NamedTuple):
    """Elements [lo, hi) along the cut axis of the row's ``part``-th logical tensor; they lie at ``at`` locally."""

    part: int
    lo: int
    hi: int
    at: int


class Split(NamedTuple):
    """One rank's share of a row along the cut axis: ``size`` local elements, of which those from ``used`` on are padding."""

    size: int
    used: int
    segments: tuple[Segment, ...]


Splitter = Callable[[Param, tuple[Shape, ...], ModelSizes, int, int], Split]


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """The vocabulary that Megatron's GPTModel must be built with: the next multiple of ``multiple * tp``."""
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """The global layers of each pipeline stage."""
    each = num_layers // pp
    return tuple(range(stage * each, (stage + 1) * each) for stage in range(pp))


def megatron_layout(
    hf_config: HFConfig,
    grid: MegatronGrid,
    *,
    vocab_multiple: int = VOCAB_MULTIPLE,
    transformer_impl: TransformerImpl = "local",
) -> Layout:
    """What each trainer rank holds, under the names of ``GPTModel.named_parameters()``.

    Raises ConfigError for a grid that does not divide the model, ArchitectureError for an unknown model.
    """
    arch = architecture(hf_config)
    sizes = arch.sizes(hf_config)
    _check_megatron_grid(arch.name, sizes, grid)
    stages = stage_layers(sizes.num_layers, grid.pp)
    vocab = padded_vocab_size(sizes.vocab, grid.tp, vocab_multiple)

    def splitter(param: Param, shapes: tuple[Shape, ...], sizes: ModelSizes, tp: int, rank: int) -> Split:
        if param.shard is Shard.VOCAB:
            return _split_vocab(sizes.vocab, vocab, tp, rank)
        return _split_query_groups(sizes, tp, rank) if param.op is Op.QKV else _split_even(param, shapes, tp, rank)

    holdings = []
    for stage, layers in enumerate(stages):
        rows = []
        for param, layer in arch.rows(sizes.num_layers):
            if _on_stage(param, layer, stage, layers, grid.pp, sizes.tied):
                rows.append((param, layer, param.megatron_name(transformer_impl, layer - layers.start)))
        holdings += [_holding(rows, sizes, grid.tp, tp_rank, splitter) for tp_rank in range(grid.tp)]
    holding_of = tuple(t + grid.tp * p for p in range(grid.pp) for _ in range(grid.dp) for t in range(grid.tp))
    return Layout(f"megatron {grid}", arch.tensors(hf_config), tuple(holdings), holding_of)


def vllm_layout(hf_config: HFConfig, tp: int, replicas: int = 1) -> Layout:
    """What each engine worker holds, under vLLM's parameter names; rank = tp_rank + tp * replica.

    A tied model has ``lm_head.weight`` as a tensor of its own: on CPU it computes from its own packed copy.
    Raises ConfigError for a ``tp`` that does not divide the model.
    """
    arch = architecture(hf_config)
    sizes = arch.sizes(hf_config)
    vocab = padded_vocab_size(sizes.vocab, 1, VLLM_VOCAB_MULTIPLE)
    _check_vllm_tp(arch.name, sizes, vocab, tp)

    def splitter(param: Param, shapes: tuple[Shape, ...], sizes: ModelSizes, tp: int, rank: int) -> Split:
        if param.shard is Shard.VOCAB:
            return _split_vocab(sizes.vocab, vocab, tp, rank)
        return _split_head_blocks(sizes, tp, rank) if param.op is Op.QKV else _split_even(param, shapes, tp, rank)

    rows = [(param, layer, param.vllm_name(layer)) for param, layer in arch.rows(sizes.num_layers)]
    holdings = tuple(_holding(rows, sizes, tp, rank, splitter) for rank in range(tp))
    return Layout(f"vllm tp={tp} replicas={replicas}", arch.tensors(hf_config), holdings, tuple(range(tp)) * replicas)


def hf_layout(hf_config: HFConfig, only: Collection[str] | None = None) -> Layout:
    """One rank that holds every logical tensor whole (or those named in ``only``), under its HF name."""
    tensors = {n: s for n, s in architecture(hf_config).tensors(hf_config).items() if only is None or n in only}
    pieces = tuple(Piece(name, whole(shape), name, (0,) * len(shape)) for name, shape in tensors.items())
    return Layout("hf", tensors, (Holding(tensors, pieces),), (0,))


def _on_stage(param: Param, layer: int, stage: int, layers: range, pp: int, tied: bool) -> bool:
    if param.stage is Stage.LAYER:
        return layer in layers
    if param.stage is Stage.FIRST:
        return stage == 0
    # Tied on one stage, GPTModel allocates no output weight (skip_weight_param_allocation); on two, each has its copy.
    return stage == pp - 1 and not (param.op is Op.TIED and tied and pp == 1)


def _holding(rows: list[tuple[Param, int, str]], sizes: ModelSizes, tp: int, rank: int, splitter: Splitter) -> Holding:
    local_shapes: dict[str, Shape] = {}
    pieces: list[Piece] = []
    padding: list[Padding] = []
    for param, layer, local in rows:
        logical = param.logical(sizes, layer)
        shape = logical[0][1]
        axis = len(shape) - 1 if param.shard is Shard.ROW else 0
        share = splitter(param, tuple(s for _, s in logical), sizes, tp, rank)
        local_shapes[local] = (*shape[:axis], share.size, *shape[axis + 1 :])
        for part, lo, hi, start in share.segments:
            box = tuple((lo, hi) if a == axis else (0, extent) for a, extent in enumerate(shape))
            pieces.append(
                Piece(logical[part][0], box, local, tuple(start if a == axis else 0 for a in range(len(shape))))
            )
        if share.used < share.size:
            padding.append(Padding(local, ((share.used, share.size), *whole(shape[1:]))))
    return Holding(local_shapes, tuple(pieces), tuple(padding))


def _split_even(param: Param, shapes: tuple[Shape, ...], tp: int, rank: int) -> Split:
    """Every part cut into ``tp`` equal runs; the rank's runs lie one after the other."""
    if param.shard is Shard.REPLICATED:
        tp, rank = 1, 0
    segments: list[Segment] = []
    at = 0
    for part, shape in enumerate(shapes):
        each = shape[-1 if param.shard is Shard.ROW else 0] // tp
        segments.append(Segment(part, rank * each, (rank + 1) * each, at))
        at += each
    return Split(at, at, tuple(segments))


def _split_vocab(vocab: int, padded: int, tp: int, rank: int) -> Split:
    each = padded // tp
    lo, hi = rank * each, min((rank + 1) * each, vocab)
    return Split(each, max(hi - lo, 0), (Segment(0, lo, hi, 0),) if hi > lo else ())


def _split_query_groups(sizes: ModelSizes, tp: int, rank: int) -> Split:
    """Megatron: for each of the rank's query groups its query heads, then its key head, then its value head."""
    head, queries = sizes.head, sizes.heads // sizes.kv_heads * sizes.head
    groups = sizes.kv_heads // tp
    segments: list[Segment] = []
    at = 0
    for group in range(rank * groups, (rank + 1) * groups):
        for part, extent in enumerate((queries, head, head)):
            segments.append(Segment(part, group * extent, (group + 1) * extent, at))
            at += extent
    return Split(at, at, tuple(segments))


def _split_head_blocks(sizes: ModelSizes, tp: int, rank: int) -> Split:
    """vLLM: the rank's query heads, then its key heads, then its value heads; with more ranks than key/value heads, each of
    those lies on ``tp / kv_heads`` neighbouring ranks."""
    queries = sizes.q // tp
    if tp >= sizes.kv_heads:
        keys, first = sizes.head, rank // (tp // sizes.kv_heads)
    else:
        keys, first = sizes.kv // tp, rank
    return Split(
        queries + 2 * keys,
        queries + 2 * keys,
        (
            Segment(0, rank * queries, (rank + 1) * queries, 0),
            Segment(1, first * keys, (first + 1) * keys, queries),
            Segment(2, first * keys, (first + 1) * keys, queries + keys),
        ),
    )


def _divisors(*values: int) -> str:
    """The sizes that divide all values, as text: the mend in a message."""
    fits = [str(n) for n in range(1, min(values) + 1) if all(v % n == 0 for v in values)]
    return fits[0] if len(fits) == 1 else f"{', '.join(fits[:-1])} or {fits[-1]}"


def _check_megatron_grid(name: str, sizes: ModelSizes, grid: MegatronGrid) -> None:
    """Megatron splits whole query groups, so ``tp`` must divide the key/value heads (and with them the heads)."""
    for key in ("tp", "pp", "dp"):
        if getattr(grid, key) < 1:
            raise ConfigError(
                f"parallel.{key}={getattr(grid, key)} is not a positive number; set parallel.{key} to 1 or more"
            )
    fits = _divisors(sizes.heads, sizes.kv_heads, sizes.ffn)
    if grid.tp > sizes.kv_heads:
        raise ConfigError(
            f"parallel.tp={grid.tp} is greater than num_key_value_heads={sizes.kv_heads} of {name}: the trainer does not "
            f"replicate key/value heads; set parallel.tp to {fits}"
        )
    for key, value in (
        ("num_key_value_heads", sizes.kv_heads),
        ("num_attention_heads", sizes.heads),
        ("intermediate_size", sizes.ffn),
    ):
        if value % grid.tp:
            raise ConfigError(
                f"parallel.tp={grid.tp} does not divide {key}={value} of {name}; set parallel.tp to {fits}"
            )
    if sizes.num_layers % grid.pp:
        raise ConfigError(
            f"parallel.pp={grid.pp} does not divide num_hidden_layers={sizes.num_layers} of {name}; "
            f"set parallel.pp to {_divisors(sizes.num_layers)}"
        )


def _check_vllm_tp(name: str, sizes: ModelSizes, padded_vocab: int, tp: int) -> None:
    if tp < 1:
        raise ConfigError(f"rollout.tp={tp} is not a positive number; set rollout.tp to 1 or more")
    rules = (
        ("num_attention_heads", sizes.heads),
        ("intermediate_size", sizes.ffn),
        ("the padded vocabulary", padded_vocab),
    )
    sharing = "num_key_value_heads", sizes.kv_heads
    fits = [n for n in range(1, sizes.heads + 1) if all(v % n == 0 for _, v in rules) and _shares(sizes.kv_heads, n)]
    mend = f"set rollout.tp to one of {fits}"
    for key, value in rules:
        if value % tp:
            raise ConfigError(f"rollout.tp={tp} does not divide {key}={value} of {name}; {mend}")
    if not _shares(sharing[1], tp):
        raise ConfigError(
            f"rollout.tp={tp} neither divides nor is a multiple of {sharing[0]}={sharing[1]} of {name}; {mend}"
        )


def _shares(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0
