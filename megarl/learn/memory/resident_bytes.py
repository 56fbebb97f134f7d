"""Bytes of a model's residents on every rank, computed from its layout before the model is built.

They equal ``Resident.nbytes`` (``residents.py``) after the first optimizer step, which creates the moments.

Source: Megatron-Core 0.16.1 ``distributed/param_and_grad_buffer.py`` (buckets, padding) and
``optimizer/distrib_optimizer.py`` (shares of data-parallel ranks).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import lcm, prod
from typing import Any, NamedTuple, Self

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn.memory.phases import BUCKET
from megarl.learn.parallel.grid import megatron_grid
from megarl.weights.architectures import Head, architecture
from megarl.weights.reshard.adapters import adapter_layout, factors_of, trained_whole
from megarl.weights.reshard.layout import Layout, LayoutRow, Owners
from megarl.weights.reshard.layouts import megatron_layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element for each ``model.dtype``."""
MASTER_BYTES = ITEM_BYTES["float32"]
"""Bytes of an element of masters."""
PARAMETER_UNIT = 64
"""Alignment of parameters, in elements."""
BUCKET_UNIT = 128
"""Alignment of bucket ends, in elements; they are also aligned to the data-parallel size."""
OVERLAPPED_BUCKET = 40_000_000, 1_000_000
"""Elements at which a bucket is full with ``parallel.overlap_grad_reduce``: minimum, and number per data-parallel rank.
Megatron's defaults, which keep NCCL's rings bandwidth-bound."""
SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Copies of a tied embedding on the first and last stage; each has a separate bucket."""
EXPERTS = ".mlp.experts."
"""Part of the names of parameters with separate buffers (``gpt._mark_experts``)."""
FROZEN = ("visual",)
"""Modules that are trained only with ``model.train_vision_tower``."""
NEVER_TRAINED = ".scalar"
"""End of the names of parameters that are in no buffer: factors of layers."""
MODULES = (
    "chunk",
    "embedding",
    "decoder",
    "output_layer",
    "layer_inputs",
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
    "linear_q",
    "kv_layernorm",
    "router",
    "experts",
    "shared_experts",
    "local_experts",
    "linear_fc",
    "layer_norm_weight",
    "scalar",
    "norm",
    "gate",
    "projection",
    "weight",
    "bias",
)
"""Name parts in the order in which Megatron's modules register them. The order determines which data-parallel rank's
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
    bucket_bytes: int | None = None,
) -> list[dict[str, int]]:
    """Return kind -> bytes, for every rank of the grid.

    With ``model.lora`` only adapters and wholly trained modules have gradients and an optimizer.

    Args:
        hf_config: config.json of this model.
        model: The model's settings, with the dtype of its role.
        trained: It has gradients and an optimizer, in Megatron's padded buffers. Else each parameter is a tensor.
        setting: The grid's section in the settings, for errors.
        lent: Untrained parameters use another model's memory.
        bucket_bytes: ``trainer.stream_optimizer_bytes``; with it the result has a bound of the largest bucket, kind
            ``BUCKET``.

    Raises:
        ConfigError: the grid does not divide the model, or ``model.lora`` names unknown modules.
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
        ranks.append(found[kind].bytes_of(rank, parallel, model, trained, lent, bucket_bytes))
    return ranks


def _trained_by(model: ModelConfig, layout: Layout, head: Head) -> Callable[[LayoutRow], bool]:
    """Return a function that is True for trained rows of a layout."""
    if model.lora.is_used:
        whole = set(trained_whole(layout.tensors, model.lora, head))
        return lambda row: not whole.isdisjoint(row.parts)
    frozen = () if model.train_vision_tower else FROZEN

    def is_trained(row: LayoutRow) -> bool:
        module = _split_chunk(row.local)[1].partition(".")[0]
        return module not in frozen and not row.local.endswith(NEVER_TRAINED)

    return is_trained


def bucket_size(parallel: ParallelConfig) -> int | None:
    """Return the elements at which a bucket of the first stage's first chunk is full; None for a single bucket."""
    least, each = OVERLAPPED_BUCKET
    return max(least, each * parallel.dp) if parallel.overlap_grad_reduce else None


class _Bucket(NamedTuple):
    """Parameters of a buffer that are reduced together. Each data-parallel rank has an equal range of its elements."""

    begins: tuple[int, ...]
    """First element of each parameter."""
    before: tuple[int, ...]
    """Number of elements of the parameters before each parameter; the last entry is for all."""
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
        """Return the elements of parameters in a data-parallel rank's range, without gaps."""
        each = self.size // self.ranks
        return self._until((rank + 1) * each) - self._until(rank * each)

    def largest(self, rank: int) -> int:
        """Return the most elements of one parameter in a data-parallel rank's range."""
        low, high = rank * (self.size // self.ranks), (rank + 1) * (self.size // self.ranks)
        sizes = (after - before for before, after in pairwise(self.before))
        return max(min(begin + size, high) - max(begin, low) for begin, size in zip(self.begins, sizes, strict=True))

    def _until(self, end: int) -> int:
        """Return the elements of parameters before ``end``."""
        last = bisect_left(self.begins, end) - 1
        if last < 0:
            return 0
        return min(self.before[last] + end - self.begins[last], self.before[last + 1])


@dataclass(frozen=True)
class _RankBuffers:
    """Parameters of one rank, and the buckets that Megatron puts them into."""

    elements: int
    """Elements of all parameters, without padding."""
    frozen: int
    """Elements of the parameters in no buffer."""
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
        """Compute the buffers of a rank.

        Args:
            adapters: Layout of the model's adapters, which are all trained.
            tied: True if two stages have a copy of the embedding.
            is_trained: False for rows whose parameters are in no buffer.
        """
        # A router's bias keeps its dtype: it is a module buffer, not a parameter.
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
            # Megatron splits only these: gradients of other stages and chunks are ready earlier.
            first = rank < parallel.stage_size and chunk in ("", "chunk0")
            buckets[expert] += _buckets(parameters, tied, replicas[expert], bucket_size(parallel) if first else None)
        everything = sum(sizes.values())
        frozen = everything - sum(sizes[name] for name in trained)
        return cls(everything, frozen, tuple(buckets[False]), tuple(buckets[True]))

    def bytes_of(
        self,
        rank: int,
        parallel: ParallelConfig,
        model: ModelConfig,
        trained: bool,
        lent: bool,
        bucket_bytes: int | None,
    ) -> dict[str, int]:
        """Return kind -> bytes of a rank with these buffers."""
        item = ITEM_BYTES[model.dtype]
        if not trained:
            return {"parameters": (self.elements - (self.frozen if lent else 0)) * item}
        in_stage = rank % parallel.stage_size
        dense, expert = in_stage // parallel.tp, in_stage // (parallel.ep * parallel.expert_tp)
        padded = sum(bucket.size for bucket in (*self.dense, *self.experts))
        share = sum(b.share(dense) for b in self.dense) + sum(b.share(expert) for b in self.experts)
        masters = 0 if model.dtype == "float32" else MASTER_BYTES  # in a float32 model the parameters are the masters
        state = masters + 2 * ITEM_BYTES[model.moments_dtype]
        found = {
            "parameters": (padded + (0 if lent else self.frozen)) * item,
            "gradients": padded * max(item, ITEM_BYTES[model.grad_dtype]),
            "optimizer": share * state,
        }
        if bucket_bytes is not None:
            largest = [b.largest(dense) for b in self.dense] + [b.largest(expert) for b in self.experts]
            found[BUCKET] = min(share * state, max(bucket_bytes, max(largest, default=0) * state))
        return found


def _buckets(parameters: Sequence[tuple[str, int]], tied: bool, ranks: int, full: int | None) -> list[_Bucket]:
    """Compute the buckets of one buffer. It holds parameters from last to first, in the order of ready gradients.

    Args:
        full: Elements at which a bucket is full.
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
    """Return a sort key for the order of ``named_parameters()``."""
    return [_registered_part(part) for part in name.split(".")]


@cache
def _registered_part(part: str) -> tuple[int, int]:
    found = re.fullmatch(r"(.*?)(\d*)", part)
    assert found is not None, "the pattern fits any text"
    return _PLACE.get(found[1], len(_PLACE)), int(found[2] or 0)


def _in_tree_order(names: Iterable[str]) -> list[str]:
    """Return parameter names, given in creation order, in the order of ``named_parameters()``, which groups them by
    module."""
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
    """Split a local name into ``chunk<v>`` ("" without chunks) and the rest."""
    if local.startswith("chunk"):
        chunk, _, rest = local.partition(".")
        return chunk, rest
    return "", local


_PLACE = {name: place for place, name in enumerate(MODULES)}


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
