"""Estimate of the bytes that a forward pass saves for its backward pass, from sizes alone.

Saved elements per layer and token are counted as in Korthikanti et al. (2205.05198, section 4), for fused norms, rotary
embeddings, SwiGLU and an attention that saves no scores. Unfused layers, and attention with a mask, save more.
``tests/unit/test_activation_bytes.py`` compares the estimate with peaks on one H200.

A frozen linear layer saves no input, but its adapter does. With adapters on all layers this is the same tensor, plus
adapter outputs of ``rank`` elements. If ``model.lora.targets`` selects some layers, the estimate is too high by the
inputs of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn.memory.resident_bytes import ITEM_BYTES
from megarl.learn.parallel.grid import megatron_grid
from megarl.ops.divergence import BUFFERS, CHUNK_BYTES
from megarl.weights.architectures import ModelSizes
from megarl.weights.architectures.table import sizes_of_layer
from megarl.weights.reshard.adapters import EMBEDDING, names_module

FLOAT_BYTES = 4
ROW_FLOATS = 10
"""Floats that the LM head saves per row (``ops.linear_logprob``)."""
MOE = ("moe_act", "experts", "shared_experts")
"""Parts of the module that Megatron names moe."""
LM_HEAD = "lm_head"
EIGHT_BIT_COPIES = 2
"""Copies of a linear weight, one byte an element, between the forward and backward pass of ``model.fp8``: one is
transposed. An upper bound, whatever the GPU."""
TOKEN_BYTES = 8 + 1
"""Bytes that an embedding's adapter saves per token: its index in the vocabulary, and whether another rank has it."""


def activation_bytes(
    sizes: ModelSizes, model: ModelConfig, grid: ParallelConfig, tokens: int, logits_bytes: int | None = None
) -> int:
    """Return the bytes on the fullest rank for one forward and backward pass of a model.

    Args:
        tokens: Tokens of a micro-batch, split over ``grid.cp`` ranks.
        logits_bytes: Maximum bytes of logits at a time; None keeps all.
    """
    here = -(-tokens // grid.cp)
    kept, again = _layers(sizes, model, grid)
    item = ITEM_BYTES[model.dtype]
    # Stage s has pp - s micro-batches in flight; with vpp chunks a little more.
    factor = 1 + (grid.pp - 1) / (grid.pp * grid.vpp) if grid.vpp > 1 else 1.0
    most = 0.0
    for stage, chunks in enumerate(megatron_grid(grid).layers(sizes.num_layers)):
        layers = [layer for chunk in chunks for layer in chunk]
        in_flight = (grid.pp - stage) * factor
        size = in_flight * sum(kept[layer] for layer in layers) + max((again[layer] for layer in layers), default=0.0)
        size *= item * here
        if model.fp8 is not None:
            copied = 1 if model.recompute == "full" else in_flight * len(layers)
            size += EIGHT_BIT_COPIES * _linear_elements(sizes, grid) * copied
        if stage == grid.pp - 1:
            logits = here * sizes.vocab // grid.tp * item
            weight = sizes.vocab // grid.tp * sizes.hidden
            if logits_bytes is not None and logits > logits_bytes:
                logits = 2 * logits_bytes + weight * FLOAT_BYTES * _trains_head(model.lora)
            if model.lora.is_used and LM_HEAD in model.lora.targets:
                logits += weight * item  # the head merged with its adapter
            size += logits + ROW_FLOATS * FLOAT_BYTES * here
        if stage == 0:
            size += in_flight * here * item * _inputs(sizes, grid)
        if stage == 0 and model.lora.is_used and any(names_module(target, EMBEDDING) for target in model.lora.targets):
            along = grid.tp if grid.sequence_parallel else 1
            # Saved for the backward pass: A's output (B's input), and which tokens of A this rank has.
            size += in_flight * here * (_rank(model.lora, "embed_tokens") / along * item + TOKEN_BYTES)
        most = max(most, size)
    return int(most)


def divergence_bytes(
    columns: int, tokens: int, heads: Sequence[tuple[int, str]], logits_bytes: int | None = None
) -> int:
    """Return the bytes that a divergence from teachers adds to an update: their output rows, and a chunk of logits.

    Args:
        columns: Ids of the vocabulary on one rank.
        tokens: Tokens of a micro-batch on one rank.
        heads: (hidden size, dtype) of each teacher whose whole distribution is read; none with ``top_k``.
        logits_bytes: As for ``activation_bytes``.
    """
    rows = sum(columns * hidden * ITEM_BYTES[dtype] for hidden, dtype in heads)
    return rows + min(logits_bytes or CHUNK_BYTES, tokens * BUFFERS * columns * FLOAT_BYTES)


def _linear_elements(sizes: ModelSizes, grid: ParallelConfig) -> int:
    """Return the elements of a dense layer's linear weights on a rank."""
    attention = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head
    return sizes.hidden * (attention + 3 * sizes.ffn) // grid.tp


def _inputs(sizes: ModelSizes, grid: ParallelConfig) -> float:
    """Return the elements saved per token to make the layers' inputs: their source, the norm's input, sums."""
    along = grid.tp if grid.sequence_parallel else 1
    return (sizes.gated_hidden + 2 * sizes.layer_inputs) / along


def _layers(sizes: ModelSizes, model: ModelConfig, grid: ParallelConfig) -> tuple[list[float], list[float]]:
    """Return the elements that each layer saves per token of a rank, and the elements that it recomputes."""
    modules = model.recompute_modules if model.recompute == "selective" else []
    kept, again = [], []
    for layer in range(sizes.num_layers):
        parts = _parts(sizes_of_layer(sizes, layer), layer in sizes.moe_layers, grid)
        for name, size in _adapters(sizes, layer in sizes.moe_layers, model, grid).items():
            parts[name] += size
        whole = sum(parts.values())
        if model.recompute == "full":
            left = sizes.hidden / (grid.tp if grid.sequence_parallel else 1)
        else:
            names = {*modules, *(MOE if "moe" in modules else ())}
            left = whole - sum(size for name, size in parts.items() if name in names)
        kept.append(left)
        again.append(whole - left)
    return kept, again


def _parts(sizes: ModelSizes, experts: bool, grid: ParallelConfig) -> dict[str, float]:
    """Return part of a layer (Megatron's name in recompute_modules) -> elements that it saves per token."""
    h, tp = sizes.hidden, grid.tp
    along = h / (tp if grid.sequence_parallel else 1)
    found = {"residuals": (2 + sizes.norms_after) * along, "layernorm": sizes.norms_before * along}
    if sizes.layer_input:  # hidden state, gate, its activation, their product, and the norm's input
        found["layer_input"] = 2 * along + 3 * sizes.layer_input * along / h
    if sizes.kv_lora:
        query, rope = sizes.heads * (sizes.qk_nope + sizes.qk_rope), sizes.qk_rope
        found["latents"] = (sizes.q_lora + sizes.kv_lora + rope) * along / h
        found["mla_up_proj"] = (query + sizes.heads * (sizes.qk_nope + sizes.v_head) + query) / tp
        found["attention"] = (query * (not sizes.q_lora) + sizes.heads * sizes.v_head) / tp
    else:
        query, pairs = sizes.heads * sizes.head, 2 * sizes.kv_heads * sizes.head
        found["attention"] = (query + pairs + query + pairs / 2 + query) / tp
    if not experts:
        found["mlp"] = 3 * sizes.ffn / tp
        return found
    found["moe_act"] = sizes.topk * sizes.expert_ffn / tp
    found["experts"] = sizes.topk * (2 * h + 2 * sizes.expert_ffn) / tp
    found["shared_experts"] = 3 * sizes.shared_ffn / tp
    return found


def _adapters(sizes: ModelSizes, experts: bool, model: ModelConfig, grid: ParallelConfig) -> dict[str, float]:
    """Return part of a layer -> elements that its adapters save per token: A's output, and with dropout also the
    dropped-out inputs with one byte each for the mask."""
    lora = model.lora
    if not lora.is_used:
        return {}
    tp, item = grid.tp, ITEM_BYTES[model.dtype]
    along = tp if grid.sequence_parallel else 1
    dropped = 1 + 1 / item if lora.dropout else 0.0
    into, heads = sizes.hidden / along, sizes.heads * (sizes.v_head if sizes.kv_lora else sizes.head) / tp

    def kept(leaf: str, inputs: float, over: int = 1) -> float:
        """``over``: number of ranks that share A's output."""
        if ALL_LINEAR not in lora.targets and leaf not in {target.rpartition(".")[2] for target in lora.targets}:
            return 0.0
        return _rank(lora, leaf) / over + dropped * inputs

    def mlp(inputs: float, inner: float, over: int) -> float:
        return kept("gate_proj", inputs) + kept("up_proj", inputs) + kept("down_proj", inner, over)

    found: dict[str, float] = {"attention": kept("o_proj", heads, along)}
    if sizes.kv_lora:
        found["latents"] = kept("kv_a_proj_with_mqa", into, along)
        found["latents"] += kept("q_a_proj", into, along) if sizes.q_lora else 0.0
        found["mla_up_proj"] = kept("kv_b_proj", sizes.kv_lora / along)
        if sizes.q_lora:
            found["mla_up_proj"] += kept("q_b_proj", sizes.q_lora / along)
        else:
            found["attention"] += kept("q_proj", into)
    else:
        found["attention"] += sum(kept(leaf, into) for leaf in ("q_proj", "k_proj", "v_proj"))
    if not experts:
        found["mlp"] = mlp(into, sizes.ffn / tp, along)
        return found
    found["experts"] = sizes.topk * mlp(sizes.hidden, sizes.expert_ffn / tp, 1)
    found["shared_experts"] = mlp(into, sizes.shared_ffn / tp, along) if sizes.shared_ffn else 0.0
    return found


def _rank(lora: LoraConfig, leaf: str) -> int:
    """Return the largest rank of the adapters on layers of one kind."""
    return max([lora.rank, *(rank for ending, rank in lora.rank_pattern.items() if ending.endswith(leaf))])


def _trains_head(lora: LoraConfig) -> bool:
    """True if the LM head's weight gets a gradient."""
    return not lora.is_used or any(LM_HEAD in names for names in (lora.targets, lora.modules_to_save))
