"""What every rank must hold, cut from whole HF tensors with cat, chunk and stack.

Written from the engines' own sources and from nothing of megarl:

- Megatron-Core 0.16.1: ``transformer/{attention,multi_latent_attention,mlp}.py``, ``transformer/moe/*``,
  ``models/gpt/*``, ``parallel_state.RankGenerator``, ``transformer_block.get_num_layers_to_build`` with
  ``get_transformer_layer_offset``;
- vLLM 0.32.0: ``layers/{linear,vocab_parallel_embedding}.py``,
  ``layers/fused_moe/{routed_experts,expert_map_manager}.py``, ``distributed/utils.get_pp_indices``,
  ``models/{llama,mistral,qwen2,qwen3,qwen3_moe,mixtral,deepseek_v2}.py``.

``test_reshard_oracle`` holds it against those engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from megarl.weights import megatron_private
from tests.unit.reshard_cases import Case, Config, Engine, Grid, cases, configs, divisors, qwen3_config
from tests.unit.reshard_network import Network, run_threads

__all__ = [
    "Case",
    "Config",
    "Engine",
    "Grid",
    "Network",
    "Tensors",
    "assert_same",
    "cases",
    "configs",
    "divisors",
    "engine_ranks",
    "first_difference",
    "megatron_grid",
    "megatron_rank",
    "megatron_ranks",
    "numbered_hf",
    "qwen3_config",
    "random_hf",
    "run_threads",
    "shapes_of",
    "unwritten",
    "vllm_rank",
]

Tensors = dict[str, Tensor]
FLOAT32_ALWAYS = "e_score_correction_bias", "expert_bias"
"""Endings of the names of tensors that no engine casts: DeepSeek's router bias."""


# ------------------------------------------------------------------ whole models


def head_of(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def is_moe(config: Config, layer: int) -> bool:
    family = config["model_type"]
    if family == "mixtral":
        return True
    if family == "qwen3_moe":
        step = config.get("decoder_sparse_step", 1)
        return layer not in config.get("mlp_only_layers", ()) and (layer + 1) % step == 0
    return family == "deepseek_v3" and layer >= config["first_k_dense_replace"]


def num_experts(config: Config) -> int:
    return next(config[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if k in config)


def expert_names(config: Config, layer: str, expert: int) -> tuple[str, str, str]:
    """HF names of gate, up and down."""
    if config["model_type"] == "mixtral":
        p = f"{layer}block_sparse_moe.experts.{expert}."
        return p + "w1.weight", p + "w3.weight", p + "w2.weight"
    p = f"{layer}mlp.experts.{expert}."
    return p + "gate_proj.weight", p + "up_proj.weight", p + "down_proj.weight"


def moe_module(config: Config) -> str:
    return "block_sparse_moe." if config["model_type"] == "mixtral" else "mlp."


def mlp_shapes(prefix: str, ffn: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (ffn, hidden)
    yield prefix + "up_proj.weight", (ffn, hidden)
    yield prefix + "down_proj.weight", (hidden, ffn)


def attention_shapes(c: Config, p: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if c["model_type"] == "deepseek_v3":
        nope, rope, v, kv_lora = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        if c["q_lora_rank"] is None:
            yield p + "q_proj.weight", (heads * (nope + rope), hidden)
        else:
            yield p + "q_a_proj.weight", (c["q_lora_rank"], hidden)
            yield p + "q_a_layernorm.weight", (c["q_lora_rank"],)
            yield p + "q_b_proj.weight", (heads * (nope + rope), c["q_lora_rank"])
        yield p + "kv_a_proj_with_mqa.weight", (kv_lora + rope, hidden)
        yield p + "kv_a_layernorm.weight", (kv_lora,)
        yield p + "kv_b_proj.weight", (heads * (nope + v), kv_lora)
        yield p + "o_proj.weight", (hidden, heads * v)
        return
    head = head_of(c)
    for name, rows in (
        ("q", heads * head),
        ("k", c["num_key_value_heads"] * head),
        ("v", c["num_key_value_heads"] * head),
    ):
        yield f"{p}{name}_proj.weight", (rows, hidden)
        if c["model_type"] == "qwen2":
            yield f"{p}{name}_proj.bias", (rows,)
    if c["model_type"] in ("qwen3", "qwen3_moe"):
        yield p + "q_norm.weight", (head,)
        yield p + "k_norm.weight", (head,)
    yield p + "o_proj.weight", (hidden, heads * head)


def layer_shapes(c: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, p = c["hidden_size"], f"model.layers.{layer}."
    yield p + "input_layernorm.weight", (hidden,)
    yield from attention_shapes(c, p + "self_attn.")
    yield p + "post_attention_layernorm.weight", (hidden,)
    if not is_moe(c, layer):
        yield from mlp_shapes(p + "mlp.", c["intermediate_size"], hidden)
        return
    experts, ffn = num_experts(c), c.get("moe_intermediate_size", c["intermediate_size"])
    yield p + moe_module(c) + "gate.weight", (experts, hidden)
    if c["model_type"] == "deepseek_v3":
        yield p + "mlp.gate.e_score_correction_bias", (experts,)
        yield from mlp_shapes(p + "mlp.shared_experts.", c["n_shared_experts"] * ffn, hidden)
    for expert in range(experts):
        gate, up, down = expert_names(c, p, expert)
        yield from ((gate, (ffn, hidden)), (up, (ffn, hidden)), (down, (hidden, ffn)))


def shapes_of(config: Config, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """HF name -> shape; ``mtp``: with the layers for multi-token prediction, without their copies of embedding and
    output."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    table = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(layers):
        shapes |= dict(layer_shapes(config, layer))
    for layer in range(layers, layers + (config["num_nextn_predict_layers"] if mtp else 0)):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "enorm.weight": (hidden,),
            p + "hnorm.weight": (hidden,),
            p + "eh_proj.weight": (hidden, 2 * hidden),
        }
        shapes |= {**dict(layer_shapes(config, layer)), p + "shared_head.norm.weight": (hidden,)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = table
    return shapes


def numbered_hf(config: Config, mtp: bool = False) -> Tensors:
    """A whole float32 model in which no two elements are equal: 1, 2, 3, … (0 is padding, NaN is unwritten)."""
    shapes = shapes_of(config, mtp)
    ends = torch.tensor([0, *(prod(shape) for shape in shapes.values())]).cumsum(0).tolist()
    assert ends[-1] < 2**24, "float32 could not tell the elements apart"
    flat = torch.arange(1, ends[-1] + 1, dtype=torch.float32)
    return {name: flat[start : start + prod(s)].view(s) for start, (name, s) in zip(ends, shapes.items(), strict=False)}


def random_hf(config: Config, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes_of(config).items()}


def padded(weight: Tensor, multiple: int) -> Tensor:
    extra = -weight.shape[0] % multiple
    return torch.cat([weight, weight.new_zeros(extra, *weight.shape[1:])])


def cut(weight: Tensor, parts: int, which: int, dim: int = 0) -> Tensor:
    assert weight.shape[dim] % parts == 0
    each = weight.shape[dim] // parts
    return weight.narrow(dim, which * each, each)


def gate_over_up(gate: Tensor, up: Tensor, parts: int, which: int) -> Tensor:
    return torch.cat([cut(gate, parts, which), cut(up, parts, which)])


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


# ------------------------------------------------------------------ Megatron-Core


def stage_sizes(layers: int, grid: Grid) -> list[int]:
    """Layers on every pipeline stage."""
    named = {0: grid.first, grid.pp - 1: grid.last} if grid.pp > 1 else {}
    named = {stage: count for stage, count in named.items() if count is not None}
    rest, left = layers - sum(named.values()), grid.pp - len(named)
    assert rest == 0 if left == 0 else rest % left == 0
    return [named.get(stage, rest // max(left, 1)) for stage in range(grid.pp)]


def chunk_layers(layers: int, grid: Grid) -> dict[tuple[int, int], list[int]]:
    """(stage, model chunk) -> global layers: chunk 0 of every stage, then chunk 1 of every stage, …"""
    sizes, order, dealt = stage_sizes(layers, grid), iter(range(layers)), {}
    for chunk in range(grid.vpp):
        for stage, size in enumerate(sizes):
            assert size % grid.vpp == 0
            dealt[stage, chunk] = [next(order) for _ in range(size // grid.vpp)]
    return dealt


def expert_size(grid: Grid) -> int:
    """Tensor parallel size within an expert."""
    return grid.etp or (grid.tp if grid.ep == 1 else 1)


def megatron_rank(
    c: Config, hf: Tensors, grid: Grid, rank: int, *, te: bool = False, mtp: bool = False, multiple: int = 64
) -> Tensors:
    """``GPTModel.named_parameters()`` and the router bias of one rank; ``te``: names of the TransformerEngine spec."""
    in_stage = grid.tp * grid.cp * grid.dp
    stage, place = divmod(rank, in_stage)
    t = place % grid.tp
    et, e = place % expert_size(grid), place // expert_size(grid) % grid.ep
    tied = c.get("tie_word_embeddings", False)
    out: Tensors = {}
    for chunk in range(grid.vpp):
        held: Tensors = {}
        ends = stage == grid.pp - 1 and chunk == grid.vpp - 1
        if (stage == 0 and chunk == 0) or (ends and mtp):  # prediction layers embed the next token themselves
            held["embedding.word_embeddings.weight"] = cut(
                padded(hf["model.embed_tokens.weight"], multiple * grid.tp), grid.tp, t
            )
        for local, layer in enumerate(chunk_layers(c["num_hidden_layers"], grid)[stage, chunk]):
            held |= prefixed(f"decoder.layers.{local}.", megatron_layer(c, hf, layer, grid, t, et, e, te))
        for number in range(c["num_nextn_predict_layers"] if ends and mtp else 0):
            held |= prefixed(f"mtp.layers.{number}.", megatron_mtp(c, hf, number, grid, t, et, e, te))
        if ends:
            held["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not (tied and grid.pp == 1):  # on one stage the embedding itself is used
                table = hf["model.embed_tokens.weight" if tied else "lm_head.weight"]
                held["output_layer.weight"] = cut(padded(table, multiple * grid.tp), grid.tp, t)
        out |= prefixed(f"chunk{chunk}." if grid.vpp > 1 else "", held)
    return out


def megatron_layer(c: Config, hf: Tensors, layer: int, grid: Grid, t: int, et: int, e: int, te: bool) -> Tensors:
    p = f"model.layers.{layer}."
    mla, moe = c["model_type"] == "deepseek_v3", is_moe(c, layer)
    # TransformerEngine fuses a norm into the linear layer after it; neither MLA's two down projections nor a router do
    # that.
    norm = "self_attention.linear_qkv.layer_norm_weight" if te and not mla else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if te and not moe else "pre_mlp_layernorm.weight"
    attention = (
        megatron_mla(c, hf, p + "self_attn.", grid.tp, t, te)
        if mla
        else megatron_gqa(c, hf, p + "self_attn.", grid.tp, t)
    )
    return {
        norm: hf[p + "input_layernorm.weight"],
        **prefixed("self_attention.", attention),
        mlp_norm: hf[p + "post_attention_layernorm.weight"],
        **prefixed(
            "mlp.", megatron_moe(c, hf, p, grid, t, et, e, te) if moe else megatron_mlp(hf, p + "mlp.", grid.tp, t)
        ),
    }


def megatron_mtp(c: Config, hf: Tensors, number: int, grid: Grid, t: int, et: int, e: int, te: bool) -> Tensors:
    """A prediction layer; its projection is cut in both specs and what comes out gathered."""
    layer = c["num_hidden_layers"] + number
    p = f"model.layers.{layer}."
    return {
        "enorm.weight": hf[p + "enorm.weight"],
        "hnorm.weight": hf[p + "hnorm.weight"],
        "eh_proj.weight": cut(hf[p + "eh_proj.weight"], grid.tp, t),
        **prefixed(megatron_private.mtp_inner(), megatron_layer(c, hf, layer, grid, t, et, e, te)),
        "final_layernorm.weight": hf[p + "shared_head.norm.weight"],
    }


def megatron_gqa(c: Config, hf: Tensors, p: str, tp: int, t: int) -> Tensors:
    """Query, key and value heads lie group by group; with more ranks than groups a rank holds a part of a group."""
    groups = c["num_key_value_heads"]
    out = {"linear_proj.weight": cut(hf[p + "o_proj.weight"], tp, t, 1)}
    for kind in ("weight", "bias") if c["model_type"] == "qwen2" else ("weight",):
        q, k, v = (hf[f"{p}{x}_proj.{kind}"] for x in "qkv")
        by_group = torch.cat([x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)], dim=1)
        out[f"linear_qkv.{kind}"] = cut(by_group.reshape(-1, *q.shape[1:]), tp, t)
    if c["model_type"] in ("qwen3", "qwen3_moe"):
        out["q_layernorm.weight"] = hf[p + "q_norm.weight"]
        out["k_layernorm.weight"] = hf[p + "k_norm.weight"]
    return out


def megatron_mla(c: Config, hf: Tensors, p: str, tp: int, t: int, te: bool) -> Tensors:
    """Both down projections are whole on every rank: "duplicated" in TransformerEngine's spec, and so in
    ``learn/models/specs.py``, because the gradients of Megatron's own local spec, which cuts them, are wrong."""
    out = {
        "linear_kv_down_proj.weight": hf[p + "kv_a_proj_with_mqa.weight"],
        "linear_kv_up_proj.layer_norm_weight" if te else "kv_layernorm.weight": hf[p + "kv_a_layernorm.weight"],
        "linear_kv_up_proj.weight": cut(hf[p + "kv_b_proj.weight"], tp, t),
        "linear_proj.weight": cut(hf[p + "o_proj.weight"], tp, t, 1),
    }
    if c["q_lora_rank"] is None:
        return {"linear_q_proj.weight": cut(hf[p + "q_proj.weight"], tp, t), **out}
    return {
        "linear_q_down_proj.weight": hf[p + "q_a_proj.weight"],
        "linear_q_up_proj.layer_norm_weight" if te else "q_layernorm.weight": hf[p + "q_a_layernorm.weight"],
        "linear_q_up_proj.weight": cut(hf[p + "q_b_proj.weight"], tp, t),
        **out,
    }


def megatron_mlp(hf: Tensors, p: str, tp: int, t: int) -> Tensors:
    return {
        "linear_fc1.weight": gate_over_up(hf[p + "gate_proj.weight"], hf[p + "up_proj.weight"], tp, t),
        "linear_fc2.weight": cut(hf[p + "down_proj.weight"], tp, t, 1),
    }


def megatron_moe(c: Config, hf: Tensors, p: str, grid: Grid, t: int, et: int, e: int, te: bool) -> Tensors:
    out = {"router.weight": hf[p + moe_module(c) + "gate.weight"]}
    if c["model_type"] == "deepseek_v3":
        out["router.expert_bias"] = hf[p + "mlp.gate.e_score_correction_bias"]
        out |= prefixed("shared_experts.", megatron_mlp(hf, p + "mlp.shared_experts.", grid.tp, t))
    assert num_experts(c) % grid.ep == 0
    each, etp = num_experts(c) // grid.ep, expert_size(grid)
    for local in range(each):
        gate, up, down = (hf[name] for name in expert_names(c, p, e * each + local))
        fc1 = f"experts.linear_fc1.weight{local}" if te else f"experts.local_experts.{local}.linear_fc1.weight"
        fc2 = f"experts.linear_fc2.weight{local}" if te else f"experts.local_experts.{local}.linear_fc2.weight"
        out |= {fc1: gate_over_up(gate, up, etp, et), fc2: cut(down, etp, et, 1)}
    return out


def megatron_ranks(config: Config, hf: Tensors, grid: Grid, **options: Any) -> list[Tensors]:
    return [megatron_rank(config, hf, grid, rank, **options) for rank in range(grid.world)]


def megatron_grid(config: Config, hf: Tensors, tp: int, pp: int, dp: int) -> list[Tensors]:
    """Rank -> parameters of a plain grid, in memory of their own."""
    ranks = megatron_ranks(config, hf, Grid(tp, pp, dp))
    return [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in ranks]


# ------------------------------------------------------------------ vLLM


def vllm_stage(layers: int, pp: int, stage: int) -> range:
    """Left-over layers go one each to the stages before the last, the latest first."""
    sizes = [layers // pp] * pp
    for i in range(layers % pp):
        sizes[pp - 2 - i] += 1
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def vllm_rank(c: Config, hf: Tensors, tp: int, rank: int, pp: int = 1, expert_parallel: bool = False) -> Tensors:
    """vLLM's parameters on one worker; a tied lm_head too, which on CPU computes from a copy of its own."""
    stage, t = divmod(rank, tp)
    tied, last = c.get("tie_word_embeddings", False), stage == pp - 1
    everywhere = c["model_type"] in ("qwen3_moe", "mixtral")  # these two models leave nothing out on other stages
    out: Tensors = {}
    if stage == 0 or everywhere or (last and tied and c["model_type"] != "deepseek_v3"):
        out["model.embed_tokens.weight"] = cut(padded(hf["model.embed_tokens.weight"], 64), tp, t)
    for layer in vllm_stage(c["num_hidden_layers"], pp, stage):
        out |= prefixed(f"model.layers.{layer}.", vllm_layer(c, hf, layer, tp, t, expert_parallel))
    if last or everywhere:
        out["model.norm.weight"] = hf["model.norm.weight"]
        out["lm_head.weight"] = cut(padded(hf["model.embed_tokens.weight" if tied else "lm_head.weight"], 64), tp, t)
    return out


def vllm_layer(c: Config, hf: Tensors, layer: int, tp: int, t: int, expert_parallel: bool) -> Tensors:
    p, mla = f"model.layers.{layer}.", c["model_type"] == "deepseek_v3"
    attention = vllm_mla(c, hf, p + "self_attn.", tp, t) if mla else vllm_gqa(c, hf, p + "self_attn.", tp, t)
    module = moe_module(c) if is_moe(c, layer) else "mlp."
    moe = vllm_moe(c, hf, p, tp, t, expert_parallel) if is_moe(c, layer) else vllm_mlp(hf, p + "mlp.", tp, t)
    norms = {name: hf[p + name] for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    return {**norms, **prefixed("self_attn.", attention), **prefixed(module, moe)}


def vllm_gqa(c: Config, hf: Tensors, p: str, tp: int, t: int) -> Tensors:
    """QKVParallelLinear: three blocks; with more ranks than key/value heads, neighbours share one."""
    kv = c["num_key_value_heads"]
    copies = max(tp // kv, 1)
    out = {"o_proj.weight": cut(hf[p + "o_proj.weight"], tp, t, 1)}
    for kind in ("weight", "bias") if c["model_type"] == "qwen2" else ("weight",):
        q, k, v = (hf[f"{p}{x}_proj.{kind}"] for x in "qkv")
        out[f"qkv_proj.{kind}"] = torch.cat([cut(q, tp, t), *(cut(x, min(tp, kv), t // copies) for x in (k, v))])
    if c["model_type"] in ("qwen3", "qwen3_moe"):
        out |= {name: hf[p + name] for name in ("q_norm.weight", "k_norm.weight")}
    return out


def vllm_mla(c: Config, hf: Tensors, p: str, tp: int, t: int) -> Tensors:
    """Both down projections are whole on every rank, one over the other where the query has one."""
    out = {
        "kv_a_layernorm.weight": hf[p + "kv_a_layernorm.weight"],
        "kv_b_proj.weight": cut(hf[p + "kv_b_proj.weight"], tp, t),
        "o_proj.weight": cut(hf[p + "o_proj.weight"], tp, t, 1),
    }
    kv_down = hf[p + "kv_a_proj_with_mqa.weight"]
    if c["q_lora_rank"] is None:
        return {"q_proj.weight": cut(hf[p + "q_proj.weight"], tp, t), "kv_a_proj_with_mqa.weight": kv_down, **out}
    return {
        "fused_qkv_a_proj.weight": torch.cat([hf[p + "q_a_proj.weight"], kv_down]),
        "q_a_layernorm.weight": hf[p + "q_a_layernorm.weight"],
        "q_b_proj.weight": cut(hf[p + "q_b_proj.weight"], tp, t),
        **out,
    }


def vllm_mlp(hf: Tensors, p: str, tp: int, t: int) -> Tensors:
    return {
        "gate_up_proj.weight": gate_over_up(hf[p + "gate_proj.weight"], hf[p + "up_proj.weight"], tp, t),
        "down_proj.weight": cut(hf[p + "down_proj.weight"], tp, t, 1),
    }


def vllm_experts(experts: int, tp: int, t: int, expert_parallel: bool) -> range:
    """determine_expert_map, placement "linear": the first ranks get one of the left-over experts each."""
    if not expert_parallel:
        return range(experts)
    each, more = divmod(experts, tp)
    start = t * each + min(t, more)
    return range(start, start + each + (t < more))


def vllm_moe(c: Config, hf: Tensors, p: str, tp: int, t: int, expert_parallel: bool) -> Tensors:
    out = {"gate.weight": hf[p + moe_module(c) + "gate.weight"]}
    if c["model_type"] == "deepseek_v3":
        out["gate.e_score_correction_bias"] = hf[p + "mlp.gate.e_score_correction_bias"]
        out |= prefixed("shared_experts.", vllm_mlp(hf, p + "mlp.shared_experts.", tp, t))
    parts, which = (1, 0) if expert_parallel else (tp, t)
    held = [
        tuple(hf[name] for name in expert_names(c, p, expert))
        for expert in vllm_experts(num_experts(c), tp, t, expert_parallel)
    ]
    return {
        **out,
        "experts.routed_experts.w13_weight": torch.stack([gate_over_up(g, u, parts, which) for g, u, _ in held]),
        "experts.routed_experts.w2_weight": torch.stack([cut(down, parts, which, 1) for _, _, down in held]),
    }


def engine_ranks(config: Config, hf: Tensors, engine: Engine) -> list[Tensors]:
    """Rank -> parameters of all replicas of an engine; replicas share their tensors."""
    tp, pp = engine.tp, engine.pp
    one = [vllm_rank(config, hf, tp, rank, pp, engine.expert_parallel) for rank in range(tp * pp)]
    return one * engine.replicas


# ------------------------------------------------------------------ comparing


def first_difference(got: Tensors, expected: Tensors, dtype: torch.dtype = torch.float32) -> str | None:
    """Where two ranks differ, bit by bit after the cast to ``dtype``, or None."""
    if got.keys() != expected.keys():
        return f"missing {sorted(expected.keys() - got.keys())}, unexpected {sorted(got.keys() - expected.keys())}"
    for name, want in expected.items():
        want = want if name.endswith(FLOAT32_ALWAYS) else want.to(dtype)
        have = got[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"{name}: {tuple(have.shape)} {have.dtype}, expected {tuple(want.shape)} {want.dtype}"
        if not torch.equal(have, want):
            index = tuple((have != want).nonzero()[0].tolist())
            return f"{name}{list(index)}: {have[index].item()}, expected {want[index].item()}"
    return None


def assert_same(got: Tensors, expected: Tensors, dtype: torch.dtype = torch.float32) -> None:
    difference = first_difference(got, expected, dtype)
    assert difference is None, difference


def unwritten(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Tensors:
    """Local tensors full of NaN: an element that nobody writes is unequal to everything."""
    return {
        name: torch.full(shape, torch.nan, dtype=torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype)
        for name, shape in shapes.items()
    }
