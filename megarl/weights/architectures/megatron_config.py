"""Megatron-Core arguments that compute the same function as ``transformers`` for a config.json.

Plain values only; imports no Megatron. A setting that Megatron cannot express is refused, never dropped. Family
defaults are not here: ``complete.complete`` takes keys missing in config.json from transformers.

Sources: transformers 5.19 ``modeling_rope_utils.py`` and ``models/*/modeling_*.py``; Megatron-Core 0.16.1
``transformer/transformer_config.py``, ``transformer/moe/moe_utils.py`` (``topk_routing_with_score_function``),
``transformer/multi_latent_attention.py``, ``models/common/embeddings/*rotary*.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures.rope import max_positions, rope_settings, ropes, settings_of
from megarl.weights.architectures.table import (
    Architecture,
    HFConfig,
    ModelSizes,
    Op,
    RouterRules,
    count,
    flag,
    integer,
    layer_kinds,
    needed,
    positive,
    rotates,
)

_Q_NORMS = {"self_attention.q_layernorm.weight", "self_attention.core_attention.q_layernorm.weight"}
TOWER_THETA = 10000.0
"""Base of the rotary angles of vision towers."""
_SINKS = "self_attention.core_attention.softmax_offset"


def check(arch: Architecture, hf_config: HFConfig) -> None:
    """Raise ArchitectureError if the configuration has a setting that the table or Megatron does not support."""
    arch.check_fixed(hf_config)
    transformer_kwargs(arch, hf_config)
    gpt_kwargs(arch, hf_config)
    ropes(arch, hf_config)
    multipliers(arch, hf_config)


def transformer_kwargs(arch: Architecture, hf_config: HFConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig, or MLATransformerConfig if ``mla`` is True (pop it first).

    ``activation`` is the activation's name. Raises ArchitectureError for a setting that Megatron cannot express.
    """
    sizes = arch.sizes(hf_config)
    megatron_names = {param.megatron for param in arch.params if 0 not in param.hf[0].shape(sizes)}
    _refuse_other_masks(arch, hf_config)
    values = {
        "mla": bool(sizes.kv_lora),
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.kv_heads,
        "kv_channels": sizes.head,
        "ffn_hidden_size": sizes.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": _number(arch.name, hf_config, arch.layers.norm_epsilon),
        "gated_linear_unit": True,
        "activation": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": "self_attention.linear_qkv.bias" in megatron_names,
        "qk_layernorm": bool(_Q_NORMS & megatron_names),
    }
    if arch.multipliers.attention:
        values["softmax_scale"] = _number(arch.name, hf_config, arch.multipliers.attention)
    if arch.multipliers.attention_root:
        values["softmax_scale"] = _number(arch.name, hf_config, arch.multipliers.attention_root) ** -0.5
    turning = rotates(arch, hf_config, sizes.num_layers)
    if not all(turning):
        values["no_rope_freq"] = [int(not turns) for turns in turning]
    values |= _windows(arch, hf_config, sizes.num_layers)
    if _SINKS in megatron_names:
        values["softmax_type"] = "learnable"
    if any(param.op is Op.GATED_QKV for param in arch.params):
        values["attention_output_gate"] = True
    if sizes.global_layers or sizes.shared_layers:  # layers of other shapes have keys of their own in checkpoints
        values["hetereogenous_dist_checkpoint"] = True
    if sizes.delta_layers:
        values |= _delta_net(arch.name, sizes)
    if sizes.convolution_layers:
        values |= {
            "linear_attention_freq": [int(layer in set(sizes.convolution_layers)) for layer in range(sizes.num_layers)],
            "linear_conv_kernel_dim": sizes.taps,
            "linear_num_value_heads": None,  # no delta nets
        }
    if sizes.vision_depth:
        values |= _vision(arch, sizes, hf_config)
    if sizes.kv_lora:
        values |= _latent_attention(arch, sizes, hf_config)
    if sizes.experts:
        values |= _experts(arch, sizes, hf_config)
    return values | dict(arch.megatron)


def _delta_net(name: str, sizes: ModelSizes) -> dict[str, Any]:
    if sizes.delta_heads % sizes.delta_key_heads:
        raise ArchitectureError(
            f"linear_num_key_heads={sizes.delta_key_heads} does not divide linear_num_value_heads={sizes.delta_heads} "
            f"of {name}; correct config.json"
        )
    return {
        "linear_attention_freq": [int(layer in set(sizes.delta_layers)) for layer in range(sizes.num_layers)],
        "linear_conv_kernel_dim": sizes.taps,
        "linear_key_head_dim": sizes.delta_key,
        "linear_value_head_dim": sizes.delta_value,
        "linear_num_key_heads": sizes.delta_key_heads,
        "linear_num_value_heads": sizes.delta_heads,
    }


def gpt_kwargs(arch: Architecture, hf_config: HFConfig) -> dict[str, Any]:
    """Keyword arguments of GPTModel. ``vocab_size`` is unpadded; ``reshard.layouts.padded_vocab_size`` pads it.

    ``rope.ropes`` returns the frequencies of each layer's rotary embedding.
    """
    sizes = arch.sizes(hf_config)
    values: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "max_sequence_length": max_positions(arch.name, hf_config),
        "share_embeddings_and_output_weights": sizes.tied,
    }
    if sizes.kv_lora:  # MLA's rope is in transformer_kwargs
        return values
    rope = settings_of(arch, hf_config)
    values["rotary_base"] = rope["rope_theta"]
    if rope["partial_rotary_factor"] != 1.0 and not arch.layers.ropes:
        values["rotary_percent"] = rope["partial_rotary_factor"]
    return values


class Multipliers(NamedTuple):
    """Factors of parts of a model; the logits are divided by ``logits``."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    embedding_root: float = 1.0
    """A second factor of the embeddings, rounded to their dtype."""
    softcap: float | None = None
    """Logits z become ``softcap`` · tanh(z / ``softcap``)."""


def multipliers(arch: Architecture, hf_config: HFConfig) -> Multipliers:
    """Return the model's multipliers. Raises ArchitectureError unless each is a positive number."""
    keys = {name: getattr(arch.multipliers, name) for name in Multipliers._fields}
    if keys["softcap"] and hf_config.get(keys["softcap"]) is None:
        keys["softcap"] = ""
    found = {name: _number(arch.name, hf_config, key) for name, key in keys.items() if key}
    if "embedding_root" in found:
        found["embedding_root"] **= 0.5
    return Multipliers(**found)


def _number(name: str, hf_config: HFConfig, key: str) -> float:
    return positive(name, key, needed(name, hf_config, key))


def _vision(arch: Architecture, sizes: ModelSizes, hf_config: HFConfig) -> dict[str, Any]:
    """Arguments for M-RoPE (arXiv:2409.12191): sections of a head that rotate by a token's time, row and column."""
    name, interleaved, rope = arch.name, arch.layers.mrope_interleaved, settings_of(arch, hf_config)
    sections, rotated = rope.get("mrope_section"), int(sizes.head * rope["partial_rotary_factor"])
    if (given := rope.get("mrope_interleaved", False)) is not interleaved:
        raise ArchitectureError(
            f"{name} with mrope_interleaved={given!r} is not supported, only {interleaved}: transformers computes that "
            "whatever the key says, vLLM follows the key; use the checkpoint's own config.json"
        )
    if not isinstance(sections, (list, tuple)) or not _halve(sections, rotated):
        raise ArchitectureError(
            f"{name} with mrope_section={sections!r} is not supported: three sections with half of a head's "
            f"{rotated} rotated dimensions are; use the checkpoint's own config.json"
        )
    if interleaved and any(axis + 3 * (sections[axis] - 1) >= rotated // 2 for axis in (1, 2)):
        raise ArchitectureError(
            f"{name} with mrope_section={sections!r} is not supported: every third of a head's {rotated // 2} "
            "frequencies belongs to rows, and to columns; use the checkpoint's own config.json"
        )
    if (kind := rope["rope_type"]) != "default":
        raise ArchitectureError(
            f"{name} with rope_type={kind!r} is not supported, only 'default': Megatron-Core does not scale positions "
            "of images; use a checkpoint without the scaling, or remove it from config.json where no sequence is "
            "longer than the model was trained on"
        )
    vision = hf_config["vision_config"]
    if vision.get("out_hidden_size") != sizes.hidden:
        raise ArchitectureError(
            f"config.json of a {name} model has vision_config.out_hidden_size={vision.get('out_hidden_size')!r}, but "
            f"hidden_size={sizes.hidden}: the tower's vectors stand among the tokens'; use the checkpoint's own "
            "config.json"
        )
    theta = (vision.get("rope_parameters") or {}).get("rope_theta", TOWER_THETA)
    if theta != TOWER_THETA:
        raise ArchitectureError(
            f"{name} with vision_config.rope_parameters.rope_theta={theta!r} is not supported, only {TOWER_THETA:g}: "
            "vLLM has no other; use the checkpoint's own config.json"
        )
    return {"mrope_section": list(sections)}


def _halve(sections: Sequence[Any], width: int) -> bool:
    """True for three numbers that sum to half of ``width``."""
    return len(sections) == 3 and all(isinstance(n, int) and n >= 0 for n in sections) and 2 * sum(sections) == width


def _windows(arch: Architecture, hf_config: HFConfig, num_layers: int) -> dict[str, Any]:
    """Arguments for sliding windows. Megatron's window excludes the current token; transformers and vLLM count it."""
    windowed = [kind == "sliding_attention" for kind in layer_kinds(arch, hf_config, num_layers)]
    if arch.layers.every_second and windowed != [layer % 2 == 0 for layer in range(num_layers)]:
        raise ArchitectureError(
            f"{arch.name} with layer_types={hf_config.get('layer_types')!r} is not supported: vLLM has windows in the "
            "first layer and every second one after it, whatever layer_types says; use a checkpoint with these"
        )
    if not any(windowed):
        return {}
    window = integer(arch.name, "sliding_window", hf_config.get("sliding_window"))
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(layer) for layer in windowed]}


def _refuse_other_masks(arch: Architecture, hf_config: HFConfig) -> None:
    """Raise ArchitectureError for attention that is not causal."""
    key = "use_bidirectional_attention"
    if hf_config.get(key) == "all":
        raise ArchitectureError(
            f"{arch.name} with {key}='all' is not supported: tokens see those before them alone; use a checkpoint of a "
            "causal language model"
        )
    if not hf_config.get("is_causal", True):
        raise ArchitectureError(
            f"{arch.name} with is_causal={hf_config['is_causal']!r} is not supported: tokens see those before them "
            "alone; use a checkpoint of a causal language model, or remove is_causal from config.json"
        )


def _latent_attention(arch: Architecture, sizes: ModelSizes, hf_config: HFConfig) -> dict[str, Any]:
    name = arch.name
    if "rope_interleave" not in arch.fixed and not flag(name, hf_config, "rope_interleave"):
        raise ArchitectureError(
            f"{name} with rope_interleave=False is not supported: Megatron-Core rotates neighbouring pairs; use a "
            "checkpoint with rope_interleave=True"
        )
    return {
        "num_query_groups": sizes.heads,
        # Width of one head in the attention's output, as Megatron's DotProductAttention expects it here.
        "kv_channels": sizes.v_head,
        "qk_layernorm": True,
        "q_lora_rank": sizes.q_lora or None,
        "kv_lora_rank": sizes.kv_lora,
        "qk_head_dim": sizes.qk_nope,
        "qk_pos_emb_head_dim": sizes.qk_rope,
        "v_head_dim": sizes.v_head,
        **_latent_rope(name, hf_config),
    }


def _latent_rope(name: str, hf_config: HFConfig) -> dict[str, Any]:
    """Arguments for MLA's rope. Megatron scales the softmax by (0.1 * mscale_all_dim * ln(factor) + 1)**2 even without
    yarn; factor 1 disables that."""
    rope = rope_settings(name, hf_config)
    kind, base = rope["rope_type"], {"rotary_base": rope["rope_theta"]}
    if kind == "default":
        return {**base, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise ArchitectureError(
            f"{name} with rope_type={kind!r} is not supported, only 'default' and 'yarn'; use a checkpoint with one of "
            "these"
        )
    numbers = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    mscale, all_dim, fast, slow = (positive(name, key, value) if (value := rope.get(key)) else None for key in numbers)
    for key, refused in (
        ("attention_factor", rope.get("attention_factor") is not None),
        ("truncate", not rope.get("truncate", True)),
        ("mscale", bool(all_dim) and not mscale),
    ):
        if refused:
            raise ArchitectureError(
                f"{name} with yarn and {key}={rope.get(key)!r} is not supported: Megatron-Core derives it from mscale "
                "and mscale_all_dim; use a checkpoint that does not set it"
            )
    original = "original_max_position_embeddings"
    return {
        **base,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": integer(name, original, rope[original]),
        "beta_fast": fast or 32.0,
        "beta_slow": slow or 1.0,
        # transformers uses mscale only if both are set
        "mscale": mscale if mscale and all_dim else 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


def _experts(arch: Architecture, sizes: ModelSizes, hf_config: HFConfig) -> dict[str, Any]:
    name = arch.name
    pattern = [int(layer in set(sizes.moe_layers)) for layer in range(sizes.num_layers)]
    values = {
        "num_moe_experts": sizes.experts,
        "moe_ffn_hidden_size": sizes.expert_ffn,
        "moe_router_topk": sizes.topk,
        # A list makes dist_checkpointing store layers separately, so it is used only if layers differ.
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_shared_expert_intermediate_size": sizes.shared_ffn or None,
        # ``model.router`` (learn/models/experts.py) replaces these: independent of micro-batches.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    normed = arch.router.norms_topk or flag(name, hf_config, "norm_topk_prob")
    if arch.router.sigmoid:
        return values | _sigmoid_router(name, sizes, hf_config, normed, arch.router)
    if sizes.topk == 1 and normed:
        raise ArchitectureError(
            f"{name} with num_experts_per_tok=1 and normalised probabilities is not supported: every weight is 1 and "
            "the router gets no gradient; use a checkpoint with num_experts_per_tok above 1"
        )
    # A softmax over all experts, normalised over the chosen ones, equals the softmax over the chosen ones.
    values |= {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normed}
    if has_router_bias(arch):
        values["moe_router_dtype"] = "fp32"
        if not normed:
            raise ArchitectureError(
                f"{name} with norm_topk_prob=False is not supported: megarl divides the probabilities of experts that "
                "a bias chooses by their sum; use a checkpoint with norm_topk_prob=True"
            )
    return values | (_topk_scaling(name, hf_config) if arch.router.scales_topk else {})


def has_router_bias(arch: Architecture) -> bool:
    """True if a router bias affects the choice of experts but not their weights."""
    return any(param.megatron == "mlp.router.expert_bias" for param in arch.params)


def _topk_scaling(name: str, hf_config: HFConfig) -> dict[str, Any]:
    key = "routed_scaling_factor"
    return {"moe_router_topk_scaling_factor": positive(name, key, needed(name, hf_config, key))}


def _sigmoid_router(
    name: str, sizes: ModelSizes, hf_config: HFConfig, normed: bool, rules: RouterRules
) -> dict[str, Any]:
    if normed != (sizes.topk > 1):
        raise ArchitectureError(
            f"{name} with norm_topk_prob={normed} and num_experts_per_tok={sizes.topk} is not supported: Megatron-Core "
            "divides the "
            "sigmoid scores by their sum exactly when more than one expert is chosen; use a checkpoint that does so"
        )
    groups, chosen = (max(count(name, hf_config, key), 1) for key in ("n_group", "topk_group"))
    limited = chosen < groups
    if limited and sizes.experts % groups:
        raise ArchitectureError(
            f"n_group={groups} does not divide the {sizes.experts} experts of {name}; correct config.json"
        )
    if limited and sizes.topk // chosen != 2:
        raise ArchitectureError(
            f"{name} with num_experts_per_tok={sizes.topk} and topk_group={chosen} is not supported: transformers "
            "ranks groups by their best 2 experts, Megatron-Core by their best "
            f"num_experts_per_tok//topk_group={sizes.topk // chosen}; use a checkpoint where that is 2"
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        # ``model.router.bias_update_rate`` updates the bias after the optimizer step, unless the guard skips that step.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        **({} if rules.unscaled else _topk_scaling(name, hf_config)),
        "moe_router_dtype": "fp32",
    }
