"""Existing layouts: Megatron-Core's grid, its checkpoints, vLLM's fused shards, and plain HF files.

All come from the tables of ``megarl.weights.architectures``; ``layout.py`` splits tensors, ``grid.py`` sets owners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

from megarl.core.errors import ArchitectureError, ConfigError
from megarl.weights.architectures import Architecture, Head, HFConfig, ModelSizes, architecture
from megarl.weights.architectures.table import (
    EXPERT,
    VLLM_LAYER,
    Logical,
    Occurrence,
    Op,
    Param,
    Shard,
    Stage,
    hf_name,
    parts_of,
    prediction_tensors,
)
from megarl.weights.megatron_private import mtp_inner
from megarl.weights.reshard.grid import MegatronGrid, check_grid, recurrent_rules, shares_heads
from megarl.weights.reshard.layout import (
    AxisSpan,
    Layout,
    LayoutRow,
    Owners,
    Padding,
    Piece,
    Shape,
    Sharder,
    Split,
    shard_axis,
)

__all__ = [
    "VOCAB_MULTIPLE",
    "Layout",
    "MegatronGrid",
    "Padding",
    "Piece",
    "dist_layout",
    "hf_layout",
    "megatron_layout",
    "padded_vocab_size",
    "vllm_layout",
]

VOCAB_MULTIPLE = 64
"""Embedding rows on every Megatron rank are a multiple of this."""
VLLM_VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE: the total embedding is a multiple of this, for any tensor parallel size."""

MEGATRON_LAYER = "decoder.layers.{}."
MTP_LAYER = "mtp.layers.{}."
MTP_INNER = "transformer_layer."
"""Name in checkpoints of every version; models use ``mtp_inner()``."""

TransformerImpl = Literal["local", "transformer_engine"]


class _Spot(NamedTuple):
    """One fused tensor of one occurrence of a row: everything in a LayoutRow except the split."""

    op: Op
    shard: Shard
    parts: tuple[Logical, ...]
    occurrence: Occurrence
    local: str
    owners: Owners
    stack: Shape = ()
    lead: Shape = ()


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Return the vocabulary size for Megatron's GPTModel: the next multiple of ``multiple * tp``."""
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def megatron_layout(
    hf_config: HFConfig,
    grid: MegatronGrid,
    *,
    vocab_multiple: int = VOCAB_MULTIPLE,
    transformer_impl: TransformerImpl = "local",
    mtp: bool = False,
    head: Head = "lm",
    setting: str = "parallel",
) -> Layout:
    """Layout of each trainer rank's tensors, named as in ``GPTModel.named_parameters()`` (and the router bias buffer).

    With ``grid.vpp`` > 1 names have the prefix ``chunk<v>.``. ``mtp``: the model has multi-token prediction layers.
    ``head="score"``: a critic or reward model. ``setting``: the grid's settings section, for errors.

    Raises ConfigError for a grid that does not divide the model, ArchitectureError for an unknown model.
    """
    arch = architecture(hf_config, head)
    sizes = arch.sizes(hf_config)
    check_grid(arch.name, sizes, grid, setting)
    sharder = Sharder(sizes, padded_vocab_size(sizes.vocab, grid.tp, vocab_multiple), interleaved=True)
    return Layout(
        f"megatron {grid}" if head == "lm" else f"megatron {grid} head={head}",
        arch.tensors(hf_config, mtp=mtp),
        grid.world_size,
        _rows(_megatron_spots(arch, sizes, grid, transformer_impl, mtp), sharder),
        _dtypes(arch, sizes),
    )


def _megatron_spots(
    arch: Architecture, sizes: ModelSizes, grid: MegatronGrid, transformer_impl: TransformerImpl, mtp: bool
) -> Iterator[_Spot]:
    stages = grid.layers(sizes.num_layers)
    where = {
        layer: (p, v, layer - chunk.start)
        for p, chunks in enumerate(stages)
        for v, chunk in enumerate(chunks)
        for layer in chunk
    }
    dense = [grid.dense(p) for p in range(grid.pp)]
    whole = [grid.whole(p) for p in range(grid.pp)]
    experts = [[grid.experts(p, e) for e in range(grid.ep)] for p in range(grid.pp)] if sizes.experts else []
    joint = [[Owners((tuple(sorted(chain(*each.ranks))),)) for each in stage] for stage in experts]
    each = sizes.experts // grid.ep
    last = grid.pp - 1, grid.vpp - 1
    for param, occurrence in _in_order(arch, sizes, mtp):
        if param.op is Op.TIED and sizes.tied and grid.pp == 1:
            continue  # one stage allocates no output weight (skip_weight_param_allocation); of two, each has its copy
        name = param.te if transformer_impl == "transformer_engine" and param.te else param.megatron
        if occurrence.layer is None:
            p, v = (0, 0) if param.is_first else last
        elif occurrence.layer < sizes.num_layers:
            p, v, index = where[occurrence.layer]
            name = MEGATRON_LAYER.format(index) + name
        else:
            p, v = last
            name = _mtp_prefix(param, occurrence.layer - sizes.num_layers, mtp_inner()) + name
        local = occurrence if occurrence.expert is None else occurrence._replace(expert=occurrence.expert % each)
        name = local.named(name)
        if grid.vpp > 1:
            name = f"chunk{v}.{name}"
        shard = param.hf[0].shard
        owners = (
            (joint if shard is Shard.FIRST else experts)[p][occurrence.expert // each]
            if occurrence.expert is not None
            else (whole if shard is Shard.REPLICATED else dense)[p]
        )
        yield _Spot(param.op, shard, parts_of(param, sizes), occurrence, name, owners)
        if mtp and sizes.mtp_layers and param.stage is Stage.FIRST and last != (0, 0):
            # Prediction layers embed tokens too.
            name = name if grid.vpp == 1 else f"chunk{last[1]}." + param.megatron
            yield _Spot(param.op, shard, param.hf, occurrence, name, dense[-1])


def _mtp_prefix(param: Param, number: int, inner: str) -> str:
    return MTP_LAYER.format(number) + ("" if param.stage is Stage.MTP else inner)


def dist_layout(
    hf_config: HFConfig,
    *,
    vocab: int | None = None,
    transformer_impl: TransformerImpl = "local",
    mtp: bool = False,
    head: Head = "lm",
) -> Layout:
    """Layout of a Megatron dist_checkpointing checkpoint: one rank with the global tensors under their keys.

    Identical layers are stacked on a leading axis; layers that differ have their number in the key; experts are always
    stacked. ``vocab``: rows of the stored embedding (``None``: the vocabulary padded to ``VOCAB_MULTIPLE``).
    """
    arch = architecture(hf_config, head)
    sizes = arch.sizes(hf_config)
    sharder = Sharder(sizes, vocab or padded_vocab_size(sizes.vocab, 1), interleaved=True)
    return Layout(
        "megatron checkpoint",
        arch.tensors(hf_config, mtp=mtp),
        1,
        _rows(_dist_spots(arch, sizes, transformer_impl, mtp), sharder),
        _dtypes(arch, sizes),
    )


def _dist_spots(arch: Architecture, sizes: ModelSizes, transformer_impl: TransformerImpl, mtp: bool) -> Iterator[_Spot]:
    differ = sizes.recurrent_layers or sizes.global_layers or sizes.shared_layers
    alike = len(sizes.moe_layers) in (0, sizes.num_layers) and not differ
    owners = Owners(((0,),))
    for param, occurrence in _in_order(arch, sizes, mtp):
        if param.op is Op.TIED and sizes.tied:
            continue  # a tied output weight is stored under the embedding's key
        name = occurrence.named(_dist_name(param, transformer_impl, latent=bool(sizes.kv_lora)))
        stack: Shape = ()
        lead: Shape = ()
        if occurrence.layer is not None and occurrence.layer >= sizes.num_layers:
            name = _mtp_prefix(param, occurrence.layer - sizes.num_layers, MTP_INNER) + name
        elif occurrence.layer is not None and alike:
            name, stack, lead = "decoder.layers." + name, (sizes.num_layers,), (occurrence.layer,)
        elif occurrence.layer is not None:
            name = MEGATRON_LAYER.format(occurrence.layer) + name
        if occurrence.expert is not None:
            stack, lead = (*stack, sizes.experts), (*lead, occurrence.expert)
        if param.op is Op.SECTIONS:
            for part, key in zip(param.hf, param.keys, strict=True):
                yield _Spot(Op.SAME, part.shard, (part,), occurrence, f"{name}.{key}", owners, stack, lead)
            continue
        yield _Spot(param.op, param.hf[0].shard, parts_of(param, sizes), occurrence, name, owners, stack, lead)


def _dist_name(param: Param, transformer_impl: TransformerImpl, latent: bool) -> str:
    """Return a parameter's key. In grouped-query models the local spec saves norms under TransformerEngine's fused
    names, even in MoE layers (``sharded_state_dict_keys_map`` of its layer spec)."""
    if param.per_expert:
        return param.megatron.replace(f"local_experts.{EXPERT}", "experts")
    if transformer_impl == "transformer_engine":
        return param.te or param.megatron
    if latent:
        return param.megatron
    return {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }.get(param.megatron, param.megatron)


def vllm_layout(
    hf_config: HFConfig, tp: int, replicas: int = 1, *, pp: int = 1, expert_parallel: bool = False, drafts: bool = False
) -> Layout:
    """Layout of the engines' workers, under vLLM's parameter names; rank = tp_rank + tp * (pp_rank + pp * replica).

    A tied model has a separate ``lm_head.weight``: on CPU, vLLM uses a separate packed copy. ``expert_parallel``: full
    experts on each rank instead of a share of each. ``drafts``: the prediction layers alone, under the names of vLLM's
    draft model. Raises ConfigError for a grid that does not divide the model.
    """
    arch = architecture(hf_config)
    sizes = arch.sizes(hf_config)
    vocab = padded_vocab_size(sizes.vocab, 1, VLLM_VOCAB_MULTIPLE)
    _check_vllm(arch, sizes, vocab, tp, pp, expert_parallel)
    text = "".join((f" pp={pp}" if pp > 1 else "", " expert_parallel" if expert_parallel else ""))
    spots = _vllm_spots(arch, sizes, tp, pp, replicas, expert_parallel, drafts)
    return Layout(
        f"vllm tp={tp}{text} replicas={replicas}{' drafts' if drafts else ''}",
        prediction_tensors(arch, hf_config) if drafts else arch.tensors(hf_config),
        tp * pp * replicas,
        _rows(spots, Sharder(sizes, vocab, interleaved=False)),
        _dtypes(arch, sizes),
    )


def _vllm_spots(
    arch: Architecture, sizes: ModelSizes, tp: int, pp: int, replicas: int, expert_parallel: bool, drafts: bool
) -> Iterator[_Spot]:
    fused = {part: f for f in arch.vllm for part in f.hf}
    stage_of = [stage for stage, n in enumerate(_vllm_layers(sizes.num_layers, pp)) for _ in range(n)]
    shares = [[tuple(t + tp * (p + pp * r) for r in range(replicas)) for t in range(tp)] for p in range(pp)]
    cut = [Owners(tuple(ranks)) for ranks in shares]
    whole = [Owners((tuple(sorted(rank for ranks in stage for rank in ranks)),)) for stage in shares]
    alone = [[Owners((ranks,)) for ranks in stage] for stage in shares]
    counts = _vllm_experts(sizes.experts, tp)
    home = [rank for rank, n in enumerate(counts) for _ in range(n)]  # rank of each expert
    absent = {part for param in arch.params for part in param.hf if 0 in part.shape(sizes)}
    rules = arch.layers.prediction
    for param, occurrence in _in_order(arch, sizes, mtp=drafts):
        number = -1 if occurrence.layer is None else occurrence.layer - sizes.num_layers
        if drafts != (number >= 0):
            continue
        if occurrence.layer is not None and drafts:
            stages, prefix = {pp - 1}, rules.vllm_prefix(number, occurrence.layer, param.stage)
        elif occurrence.layer is not None:
            stages, prefix = {stage_of[occurrence.layer]}, VLLM_LAYER.format(occurrence.layer)
        else:
            stages, prefix = _vllm_end_stages(arch, param, sizes.tied, pp), ""
        if not param.in_tower and not drafts:
            prefix = arch.vllm_text + prefix
        # Spots follow Megatron's rows; a tensor fused by vLLM comes with its first part.
        for part in (param.hf[0],) if param.op is Op.TIED else param.hf:
            joined = fused.get(part)
            if joined is not None and not absent.isdisjoint(joined.hf):
                joined = (
                    None  # a part missing in this model (MLA without a query latent): vLLM stores the other separately
                )
            if joined is not None and part is not joined.hf[0]:
                continue
            op, parts = (joined.op, joined.hf) if joined else (Op.SAME, (part,))
            if param.op is Op.TIED:
                op, parts = Op.SAME, parts_of(param, sizes)
            local = prefix + occurrence.named(joined.vllm if joined else part.name)
            for p in sorted(stages):
                if occurrence.expert is None:
                    shard = joined.shard if joined and joined.shard else part.shard
                    if param.stage is Stage.MTP and not rules.beside:  # a plain linear layer there
                        shard = Shard.REPLICATED
                    owners = (whole if shard is Shard.REPLICATED else cut)[p]
                    yield _Spot(op, shard, parts, occurrence, local, owners)
                elif expert_parallel:
                    rank = home[occurrence.expert]
                    lead = (occurrence.expert - sum(counts[:rank]),)
                    yield _Spot(op, part.shard, parts, occurrence, local, alone[p][rank], (counts[rank],), lead)
                else:
                    yield _Spot(
                        op, part.shard, parts, occurrence, local, cut[p], (sizes.experts,), (occurrence.expert,)
                    )


def _vllm_end_stages(arch: Architecture, param: Param, tied: bool, pp: int) -> set[int]:
    """Stages with a tensor outside the layers; a tied output weight needs the embedding on the last stage."""
    if arch.vllm_ends_everywhere or param.in_tower:
        return set(range(pp))
    if param.stage is Stage.LAST:
        return {pp - 1}
    return {0, pp - 1} if tied else {0}


def _vllm_layers(num_layers: int, pp: int) -> list[int]:
    """Layers of each stage: vLLM (``distributed.utils.get_pp_indices``) adds extra layers to stages before the last."""
    counts = [num_layers // pp] * pp
    for i in range(2, num_layers % pp + 2):
        counts[-i] += 1
    return counts


def _vllm_experts(experts: int, ways: int) -> list[int]:
    """Experts of each rank under vLLM's linear placement (``determine_expert_map``): the first ranks have one more."""
    return [experts // ways + (rank < experts % ways) for rank in range(ways)]


def hf_layout(
    hf_config: HFConfig, only: Collection[str] | None = None, *, mtp: bool = False, head: Head = "lm"
) -> Layout:
    """Layout of one rank with every full logical tensor (or those in ``only``), under its HF name.

    ``head="score"``: tensors of a ``...ForSequenceClassification`` with one label.
    """
    arch = architecture(hf_config, head)
    found = arch.tensors(hf_config, mtp=mtp)
    tensors = {n: s for n, s in found.items() if only is None or n in only}
    return whole_layout("hf", tensors, _dtypes(arch, arch.sizes(hf_config)))


def whole_layout(name: str, tensors: dict[str, Shape], dtypes: dict[str, str] | None = None) -> Layout:
    """Layout of one rank with these full tensors, under the same names."""
    owners = Owners(((0,),))
    rows = []
    for tensor, shape in tensors.items():
        split = Split(shape[0], shape[0], (AxisSpan(0, 0, shape[0], 0),))
        rows.append(LayoutRow(tensor, (tensor,), shape, 0, (split,), owners))
    return Layout(name, tensors, 1, rows, dtypes)


def _in_order(arch: Architecture, sizes: ModelSizes, mtp: bool) -> list[tuple[Param, Occurrence]]:
    """Every row's occurrences ordered by layer, so that a layer's tensors are consecutive; empty rows are left out."""
    rules = arch.layers.prediction
    if mtp and rules.beside and sizes.mtp_layers > 1:
        raise ArchitectureError(
            f"{arch.name} with {rules.key}={sizes.mtp_layers}: its prediction layers share a projection, but each of "
            "Megatron-Core's has its own; leave them out with --mtp drop"
        )
    found = []
    end = sizes.num_layers + sizes.mtp_layers
    for number, param in enumerate(arch.params):
        if any(0 in part.shape(sizes) for part in param.hf):
            continue
        outside = -1 if param.is_first else end
        for occurrence in arch.occurrences(param, sizes):
            if mtp or occurrence.layer is None or occurrence.layer < sizes.num_layers:
                found.append(((outside if occurrence.layer is None else occurrence.layer, number), param, occurrence))
    found.sort(key=lambda item: item[0])
    return [(param, occurrence) for _, param, occurrence in found]


def _rows(spots: Iterable[_Spot], sharder: Sharder) -> Iterator[LayoutRow]:
    known: dict[tuple[object, ...], tuple[Shape, int, tuple[Split, ...]]] = {}  # layers and experts share splits
    for op, shard, parts, occurrence, local, owners, stack, lead in spots:
        ways = len(owners.ranks)
        key = op, shard, parts, ways
        if key not in known:
            shapes = tuple(part.shape(sharder.sizes) for part in parts)
            known[key] = shapes[0], shard_axis(shard, shapes[0]), sharder.splits(op, shard, shapes, ways)
        names = tuple([hf_name(part, occurrence) for part in parts])
        yield LayoutRow(local, names, *known[key], owners, stack, lead)


def _dtypes(arch: Architecture, sizes: ModelSizes) -> dict[str, str]:
    return {
        hf_name(part, occurrence): part.dtype
        for param in arch.params
        for part in param.hf
        if part.dtype is not None
        for occurrence in arch.occurrences(param, sizes)
    }


def _check_vllm(
    arch: Architecture, sizes: ModelSizes, padded_vocab: int, tp: int, pp: int, expert_parallel: bool
) -> None:
    name = arch.name
    for key, value in (("tp", tp), ("pp", pp)):
        if value < 1:
            raise ConfigError(f"rollout.{key}={value} is not a positive number; set rollout.{key} to 1 or more")
    if pp > sizes.num_layers:
        raise ConfigError(
            f"rollout.pp={pp} is more than the {sizes.num_layers} layers of {name}; set rollout.pp to fewer"
        )
    if expert_parallel and not sizes.experts:
        raise ConfigError(
            f"rollout.expert_parallel=True, but {name} has no experts; set rollout.expert_parallel to False"
        )
    if expert_parallel and tp > sizes.experts:
        raise ConfigError(
            f"rollout.expert_parallel=True with rollout.tp={tp} leaves ranks without any of the {sizes.experts} "
            f"experts of {name}; set rollout.tp to at most {sizes.experts}"
        )
    if pp > 1 and sizes.hands_on:
        raise ConfigError(
            f"rollout.pp={pp} with {name}: vLLM hands keys, values and inputs of single layers to no other stage; set "
            "rollout.pp to 1"
        )
    rules = [("num_attention_heads", sizes.heads), ("the padded vocabulary", padded_vocab)]
    if len(sizes.moe_layers) < sizes.num_layers:
        rules.insert(1, ("intermediate_size", sizes.ffn))
    if sizes.shared_ffn:
        rules.append(("the width of the shared experts", sizes.shared_ffn))
    if sizes.experts and not expert_parallel:
        rules.append(("the width of the experts", sizes.expert_ffn))
    rules += recurrent_rules(sizes)
    kv_heads = 0 if sizes.kv_lora else sizes.kv_heads
    groups = (kv_heads, sizes.global_kv_heads)
    most = kv_heads if arch.norms.whole_width else sizes.heads
    fits = [
        n for n in range(1, most + 1) if all(v % n == 0 for _, v in rules) and all(shares_heads(g, n) for g in groups)
    ]
    fix = f"set rollout.tp to one of {fits}"
    for key, value in rules:
        if value % tp:
            raise ConfigError(f"rollout.tp={tp} does not divide {key}={value} of {name}; {fix}")
    if tp > most:
        raise ConfigError(
            f"rollout.tp={tp} is more than num_key_value_heads={kv_heads} of {name}, whose norms go over all heads: "
            f"vLLM would gather each head more than once; {fix}"
        )
    for key, number in zip(("num_key_value_heads", "num_global_key_value_heads"), groups, strict=True):
        if not shares_heads(number, tp):
            raise ConfigError(f"rollout.tp={tp} neither divides nor is a multiple of {key}={number} of {name}; {fix}")
