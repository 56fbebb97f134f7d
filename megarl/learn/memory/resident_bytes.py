"""Bytes of a model's residents on every rank, computed from its layout before anything is built.

They equal ``Resident.nbytes`` (``residents.py``) after the first optimizer step, which makes the moments.

Source: Megatron-Core 0.16.1 ``distributed/param_and_grad_buffer.py`` (buckets, padding) and
``optimizer/distrib_optimizer.py`` (shares of data-parallel ranks).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, NamedTuple, Self

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn.parallel.grid import megatron_grid
from megarl.weights.architectures import Head, architecture
from megarl.weights.reshard.adapters import adapter_layout, factors_of, trained_whole
from megarl.weights.reshard.layout import Layout, LayoutRow, Owners
from megarl.weights.reshard.layouts import megatron_layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element of each ``model.dtype``."""
MASTER_BYTES = ITEM_BYTES["float32"]
"""Bytes of an element of gradients, masters and moments."""
PARAMETER_UNIT = 64
"""Elements. Parameters begin at multiples of it."""
BUCKET_UNIT = 128
"""Elements. Buckets end at multiples of it and of the data-parallel size."""
OVERLAPPED_BUCKET = 40_000_000, 1_000_000
"""Elements from which a bucket is full with ``parallel.overlap_grad_reduce``, at least and for each data-parallel rank.
Megatron's defaults, which keep NCCL's rings bound by bandwidth."""
SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Copies of a tied embedding on the first and last stage; each has a bucket of its own."""
EXPERTS = ".mlp.experts."
"""Part of the names of what has buffers of its own (``gpt._mark_experts``)."""
FROZEN = ("visual",)
"""Modules that learn only with ``model.train_vision_tower``."""
MODULES = (
    "chunk",
    "embedding",
    "decoder",
    "output_layer",
    "visual",
    "patch_embed",
    "blocks",
    "merger",
    "norm1",
    "norm2",
    "attn",
    "ln_q",
    "layers",
    "final_layernorm",
    "input_layernorm",
    "self_attention",
    "self_attn_bda",
    "pre_mlp_layernorm",
    "mlp",
    "mlp_bda",
    "qkv",
    "proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "core_attention",
    "linear_proj",
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "router",
    "experts",
    "shared_experts",
    "local_experts",
    "linear_fc",
    "layer_norm_weight",
    "norm",
    "weight",
    "bias",
)
"""Parts of names in the order in which Megatron's modules register them. The order decides which data-parallel rank's
share has the gaps between parameters."""


def model_bytes(
    hf_config: Mapping[str, Any],
    model: ModelConfig,
    parallel: ParallelConfig,
    head: Head,
    *,
    trained: bool,
    setting: str = "parallel",
    lent: bool = False,
) -> list[dict[str, int]]:
    """Kind -> bytes, for every rank of the grid.

    With ``model.lora`` only adapters, and what is trained whole beside them, have gradients and an optimizer.

    Args:
        hf_config: Of this model.
        model: Its settings, with the dtype of its role.
        trained: It has gradients and an optimizer, in Megatron's padded buffers. Else each parameter is a tensor.
        setting: Section of the settings that the grid comes from, for errors.
        lent: What nothing trains is another model's memory.

    Raises:
        ConfigError: the grid does not divide the model, or ``model.lora`` names what it does not have.
    """
    layout = megatron_layout(
        hf_config, megatron_grid(parallel), transformer_impl=model.transformer_impl, head=head, setting=setting
    )
    adapters = None
    if model.lora.is_used:
        adapters = adapter_layout(layout, factors_of(hf_config, model.lora, head))
    is_trained = _trained_by(model, layout, head)
    tied = architecture(hf_config, head).sizes(hf_config).tied and parallel.pp > 1
    found: dict[tuple[tuple[Owners, int], ...], _RankBuffers] = {}
    ranks = []
    for rank in range(layout.num_ranks):
        kind = layout.kind(rank)
        if kind not in found:
            found[kind] = _RankBuffers.of(layout, adapters, rank, parallel, tied, is_trained)
        ranks.append(found[kind].bytes_of(rank, parallel, model.dtype, trained, lent))
    return ranks


def _trained_by(model: ModelConfig, layout: Layout, head: Head) -> Callable[[LayoutRow], bool]:
    """Return the test for rows of a layout that are trained."""
    if model.lora.is_used:
        whole = set(trained_whole(layout.tensors, model.lora, head))
        return lambda row: not whole.isdisjoint(row.parts)
    frozen = () if model.train_vision_tower else FROZEN
    return lambda row: _split_chunk(row.local)[1].partition(".")[0] not in frozen


def bucket_size(parallel: ParallelConfig) -> int | None:
    """Elements from which a bucket of the first stage's first chunk is full; None for one bucket of all parameters."""
    least, each = OVERLAPPED_BUCKET
    return max(least, each * parallel.dp) if parallel.overlap_grad_reduce else None


class _Bucket(NamedTuple):
    """Parameters of a buffer that are reduced together. Every data-parallel rank has an equal run of its elements."""

    begins: tuple[int, ...]
    """First element of each parameter ..."""
    before: tuple[int, ...]
    """... and the elements of those before it; one more for all of them."""
    size: int
    ranks: int

    @classmethod
    def of(cls, sizes: Sequence[int], ranks: int) -> Self:
        begins, before, end = [], [0], 0
        for size in sizes:
            begin = _padded(end, PARAMETER_UNIT)
            begins.append(begin)
            before.append(before[-1] + size)
            end = begin + size
        return cls(tuple(begins), tuple(before), _padded(end, lcm(ranks, BUCKET_UNIT)), ranks)

    def share(self, rank: int) -> int:
        """Elements of parameters in a data-parallel rank's run, without the gaps between them."""
        each = self.size // self.ranks
        return self._until((rank + 1) * each) - self._until(rank * each)

    def _until(self, end: int) -> int:
        """Elements of parameters before ``end``."""
        last = bisect_left(self.begins, end) - 1
        if last < 0:
            return 0
        return min(self.before[last] + end - self.begins[last], self.before[last + 1])


@dataclass(frozen=True)
class _RankBuffers:
    """Parameters of one rank, and the buckets that Megatron makes of them."""

    elements: int
    """Elements of all parameters, without padding."""
    frozen: int
    """Elements of those that are in no buffer."""
    dense: tuple[_Bucket, ...]
    experts: tuple[_Bucket, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        adapters: Layout | None,
        rank: int,
        parallel: ParallelConfig,
        tied: bool,
        is_trained: Callable[[LayoutRow], bool],
    ) -> Self:
        """Buffers of a rank.

        Args:
            adapters: Layout of the model's adapters, all of which are trained.
            tied: Two stages have a copy of the embedding.
            is_trained: False for rows whose parameters are in no buffer.
        """
        # A router's bias keeps its dtype: a buffer of the module, no parameter.
        rows = [(row, share) for row, share in layout.rows_of(rank) if layout.dtype_of(row.parts[0]) is None]
        sizes = {row.local: prod(row.local_shape(share)) for row, share in rows}
        trained = sorted({row.local for row, _ in rows if is_trained(row)}, key=_registered)
        if adapters is not None:
            more = {name: prod(shape) for name, shape in adapters.local_shapes(rank).items()}
            sizes |= more
            trained += _in_tree_order(more)
        buffers: dict[tuple[bool, str], list[tuple[str, int]]] = defaultdict(list)
        for name in trained:
            buffers[EXPERTS in name, _split_chunk(name)[0]].append((name, sizes[name]))
        replicas = {False: parallel.dp * parallel.cp, True: parallel.stage_size // (parallel.ep * parallel.expert_tp)}
        buckets: dict[bool, list[_Bucket]] = {False: [], True: []}
        for (expert, chunk), parameters in buffers.items():
            # Megatron splits no others: their gradients are not the last to be ready.
            first = rank < parallel.stage_size and chunk in ("", "chunk0")
            buckets[expert] += _buckets(parameters, tied, replicas[expert], bucket_size(parallel) if first else None)
        everything = sum(sizes.values())
        frozen = everything - sum(sizes[name] for name in trained)
        return cls(everything, frozen, tuple(buckets[False]), tuple(buckets[True]))

    def bytes_of(self, rank: int, parallel: ParallelConfig, dtype: str, trained: bool, lent: bool) -> dict[str, int]:
        """Kind -> bytes of a rank that has these buffers."""
        if not trained:
            return {"parameters": (self.elements - (self.frozen if lent else 0)) * ITEM_BYTES[dtype]}
        in_stage = rank % parallel.stage_size
        dense, expert = in_stage // parallel.tp, in_stage // (parallel.ep * parallel.expert_tp)
        padded = sum(bucket.size for bucket in (*self.dense, *self.experts))
        share = sum(b.share(dense) for b in self.dense) + sum(b.share(expert) for b in self.experts)
        copies = 2 if dtype == "float32" else 3  # two moments; masters of a float32 model are its parameters
        return {
            "parameters": (padded + (0 if lent else self.frozen)) * ITEM_BYTES[dtype],
            "gradients": padded * MASTER_BYTES,
            "optimizer": copies * share * MASTER_BYTES,
        }


def _buckets(parameters: Sequence[tuple[str, int]], tied: bool, ranks: int, full: int | None) -> list[_Bucket]:
    """Buckets of one buffer. Parameters lie in it from the last to the first, as gradients get ready.

    Args:
        full: Elements from which a bucket takes no more parameters.
    """
    groups: list[list[int]] = [[]]
    end = 0
    for name, size in reversed(parameters):
        if tied and name.endswith(SHARED):
            groups += [[size], []]
            end = 0
            continue
        groups[-1].append(size)
        end = _padded(end, PARAMETER_UNIT) + size
        if full is not None and end >= full:
            groups.append([])
            end = 0
    return [_Bucket.of(group, ranks) for group in groups if group]


def _registered(name: str) -> list[tuple[int, int]]:
    """Sort key: the order of ``named_parameters()``."""
    parts = (re.fullmatch(r"(.*?)(\d*)", part) for part in name.split("."))
    return [(_PLACE.get(part[1], len(_PLACE)), int(part[2] or 0)) for part in parts if part is not None]


def _in_tree_order(names: Iterable[str]) -> list[str]:
    """Names of parameters of modules that are made in this order, in the order of ``named_parameters()``: those of a
    module follow each other, wherever their names stand among the others."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})

    def walk(node: dict[str, Any], prefix: str) -> Iterator[str]:
        for part, inner in node.items():
            if inner:
                yield from walk(inner, f"{prefix}{part}.")
            else:
                yield prefix + part

    return list(walk(tree, ""))


def _split_chunk(local: str) -> tuple[str, str]:
    """``chunk<v>`` of a local name, "" without chunks, and the rest of it."""
    if local.startswith("chunk"):
        chunk, _, rest = local.partition(".")
        return chunk, rest
    return "", local


_PLACE = {name: place for place, name in enumerate(MODULES)}


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
