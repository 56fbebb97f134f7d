"""One tiny seeded HF checkpoint per model family, made to show mistakes: no two sizes are equal by chance."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.table import Stage

VOCAB = 200
"""No multiple of the padded vocabulary's divisor."""

_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_YARN = {  # a small base, so that beta_fast and beta_slow choose between the few frequencies
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 16,
    "beta_slow": 4,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_PLAIN_YARN = {key: value for key, value in _YARN.items() if "mscale" not in key}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK = {
    **_DENSE,
    "moe_intermediate_size": 40,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_nextn_predict_layers": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SIGMOID = {
    **_DENSE,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rope_parameters": _ROPE,
}

_GRANITE = {
    **{**_DENSE, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    **{"attention_multiplier": 0.3, "logits_scaling": 2.0},
}
_GRANITE_EXPERTS = {"intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 3}

_DELTA = {
    **_DENSE,
    "head_dim": 24,
    "initializer_range": 0.05,
    "layer_types": 3 * ["linear_attention"] + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}


def _with_tower(text: dict[str, Any]) -> dict[str, Any]:
    """As a language model of Qwen3.5; its images are in vision.py."""
    rope = {**text["rope_parameters"], "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    return {
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": {
            **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64},
            **{"patch_size": 14, "spatial_merge_size": 2, "num_position_embeddings": 25},
        },
        **{"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 2, "vision_end_token_id": 3},
        "tie_word_embeddings": False,
    }


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {**_DENSE, "num_key_value_heads": 4}),
    "llama3": (
        "llama",
        {
            **_DENSE,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "max_position_embeddings": 16384,
            "rope_parameters": _LLAMA3,
        },
    ),
    "mistral": ("mistral", {**_DENSE, "head_dim": 24, "sliding_window": 9}),
    "ernie4_5": ("ernie4_5", {**_DENSE, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**_DENSE, "tie_word_embeddings": True}),
    "qwen2_windows": (
        "qwen2",
        {
            **{**_DENSE, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            **{"rope_parameters": {**_YARN, "mscale": 0.9, "truncate": False}},
        },
    ),
    "qwen2_5_vl": (  # as a language model; its images are in vision.py
        "qwen2_5_vl",
        {
            "text_config": {**_DENSE, "rope_parameters": {"rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
            "vision_config": {
                **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64},
                **{"patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1]},
            },
            **{"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 2, "vision_end_token_id": 3},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": ("qwen3", {**_DENSE, "head_dim": 24}),
    "qwen3_vl": (  # as a language model; its images are in vision.py. Two layers add vectors of images.
        "qwen3_vl",
        {
            "text_config": {
                **{**_DENSE, "head_dim": 24, "num_hidden_layers": 8},
                "rope_parameters": {**_ROPE, "mrope_section": [6, 3, 3], "mrope_interleaved": True},
            },
            "vision_config": {
                **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64},
                **{"patch_size": 14, "spatial_merge_size": 2, "num_position_embeddings": 25},
                "deepstack_visual_indexes": [0, 2],
            },
            **{"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 2, "vision_end_token_id": 3},
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **{**_DENSE, "tie_word_embeddings": True, "layer_types": [*["conv"] * 2, "full_attention", "conv"]},
            **{"intermediate_size": 130, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.2, "conv_L_cache": 4},
        },
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_DELTA, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72}
        | {"num_experts": 8, "num_experts_per_tok": 3},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**_DELTA, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "mlp_only_layers": [1]}
        | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_5_vl": ("qwen3_5", _with_tower(_DELTA)),
    "qwen3_5_moe_vl": (
        "qwen3_5_moe",
        _with_tower(
            {**_DELTA, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72}
            | {"num_experts": 8, "num_experts_per_tok": 3}
        ),
    ),
    "mixtral": ("mixtral", {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_DENSE,
            "head_dim": 24,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_mixed": (  # dense layers between, probabilities as they come from the softmax
        "qwen3_moe",
        {
            **_DENSE,
            "head_dim": 24,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [2],
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**_DEEPSEEK, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        {**_DEEPSEEK, "first_k_dense_replace": 0, "max_position_embeddings": 2048, "rope_parameters": _YARN},
    ),
    "kimi_k2": (
        "kimi_k2",
        {**_DEEPSEEK, "first_k_dense_replace": 0, "max_position_embeddings": 2048, "rope_parameters": _YARN},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **{**_DEEPSEEK, "n_group": 1, "topk_group": 1},
            **{"q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
            **{"max_position_embeddings": 2048, "rope_parameters": _YARN},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **_SIGMOID,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{**_DEEPSEEK, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-4, "rope_parameters": _ROPE},
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        },
    ),
    "dots1": ("dots1", {**_SIGMOID, "sliding_window": None, "attention_bias": False}),
    "solar_open": ("solar_open", {**_SIGMOID, "rope_parameters": _PLAIN_YARN}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **{**_DENSE, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56},
            **{"num_experts": 8, "num_experts_per_tok": 3},
        },
    ),
    "granite": ("granite", {**_GRANITE, "tie_word_embeddings": True}),
    "granitemoe": ("granitemoe", {**_GRANITE, **_GRANITE_EXPERTS, "tie_word_embeddings": True}),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, **_GRANITE_EXPERTS, "shared_intermediate_size": 56}),
    "seed_oss": ("seed_oss", {**_DENSE, "head_dim": 24, "attention_bias": True}),
    "smollm3": ("smollm3", {**_DENSE, "no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {**_DENSE, "head_dim": 24}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            **{**_DENSE, "head_dim": 24, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {
            **{**_DENSE, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": ("olmoe", {**_DENSE, "num_experts": 8, "num_experts_per_tok": 3}),
    "olmo3": (
        "olmo3",
        {
            **{**_DENSE, "head_dim": 24, "sliding_window": 7, "layer_types": _WINDOWS},
            "rope_parameters": {
                "full_attention": _PLAIN_YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "ministral3": (
        "ministral3",
        {
            **{**_DENSE, "head_dim": 24},
            "rope_parameters": {**_PLAIN_YARN, "original_max_position_embeddings": 10, "llama_4_scaling_beta": 0.3},
            "llama_4_scaling": {"original_max_position_embeddings": 10, "beta": 0.3},  # vLLM reads this alone
        },
    ),
    "exaone4": ("exaone4", {**_DENSE, "head_dim": 24, "sliding_window": 7, "layer_types": _WINDOWS}),
    "exaone_moe": (
        "exaone_moe",
        {
            **{**_DENSE, "head_dim": 24, "sliding_window": 7, "layer_types": _WINDOWS, "num_shared_experts": 2},
            **{"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            **{**_DENSE, "head_dim": 24, "tie_word_embeddings": True, "query_pre_attn_scalar": 12},
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "rope_parameters": {
                "sliding_attention": _ROPE,
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            **{**_DENSE, "head_dim": 24, "tie_word_embeddings": True, "sliding_window": 8, "num_key_value_heads": 4},
            **{"global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
            **{"final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0},
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": _ROPE,
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            },
        },
    ),
    "glm4": (
        "glm4",
        {**_DENSE, "head_dim": 24, "attention_bias": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "glm4_unbiased": (  # as GLM-4-32B
        "glm4",
        {**_DENSE, "head_dim": 24, "attention_bias": False, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **{**_DENSE, "head_dim": 24, "moe_intermediate_size": 40, "moe_num_experts": 8, "moe_k": 3},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **{**_DENSE, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9},
            "initializer_range": 0.1,
            "rope_parameters": {**_YARN, "truncate": False, "mscale": None, "mscale_all_dim": None},
        },
    ),
    "phi3": ("phi3", {**_DENSE, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.75}}),
    "gemma4_small": (  # as E2B
        "gemma4_text",
        {
            **{**_DENSE, "head_dim": 24, "tie_word_embeddings": True, "sliding_window": 8, "num_hidden_layers": 6},
            **{"num_key_value_heads": 1, "global_head_dim": 32, "attention_k_eq_v": False},
            **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
            **{"final_logit_softcapping": 3.0, "vocab_size_per_layer_input": VOCAB},
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": _ROPE,
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            },
        },
    ),
}
"""Name -> (model_type, keyword arguments of its transformers config)."""
ONE_STAGE = ("gemma4_small",)
"""Families whose layers take tensors of earlier ones, all on one pipeline stage."""
ALIKE = (
    *("kimi_k2", "deepseek_v2", "glm4_moe", "glm4_moe_lite", "dots1", "solar_open", "qwen2_moe"),
    *("granite", "granitemoe", "granitemoeshared", "seed_oss", "smollm3", "qwen2_windows"),
    *("olmo2", "gemma3_text", "olmoe", "minimax_m2", "hunyuan_v1_dense"),
    *("lfm2", "qwen3_5_vl", "qwen3_5_moe_vl"),
    *("phi3", "glm4", "glm4_unbiased", "ernie4_5_moe", "olmo3", "exaone4", "exaone_moe", "ministral3", "gpt_oss"),
)
"""Families whose rows are those of others: every run has them on one grid, ``make soak`` on all."""

WITH_CLASS = tuple(name for name, (model_type, _) in FAMILIES.items() if not ARCHITECTURES[model_type].config_class)
"""Families that transformers knows by their name."""
MOE = tuple(
    name
    for name, (model_type, _) in FAMILIES.items()
    if any(p.stage is Stage.MOE for p in ARCHITECTURES[model_type].params)
)


def score_class() -> Any:
    """Qwen2.5-VL with a score head, of transformers' generic class: it has none by name. AutoModel finds it, too."""
    from transformers import AutoModelForSequenceClassification, Qwen2_5_VLConfig
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPreTrainedModel

    class Qwen2_5_VLForSequenceClassification(GenericForSequenceClassification, Qwen2_5_VLPreTrainedModel):
        pass

    AutoModelForSequenceClassification.register(Qwen2_5_VLConfig, Qwen2_5_VLForSequenceClassification, exist_ok=True)
    return Qwen2_5_VLForSequenceClassification


def hf_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """The family's model in float32, random but with nothing at its neutral value (norms, biases, router bias)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type, settings = FAMILIES[family]
    config_class = ARCHITECTURES[model_type].config_class
    config = AutoConfig.for_model(config_class or model_type, **{**settings, **changes})
    torch.manual_seed(seed)
    make = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "ln_q" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
                if model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                    tensor.mul_(0.2)  # its scores are not divided; large ones magnify rounding
            elif name.endswith((".bias", "proj_bias", "e_score_correction_bias")):
                tensor.copy_(0.3 * torch.randn_like(tensor))
            elif name.endswith("A_log"):  # a state that decays within a token would hide most mistakes
                tensor.copy_(0.3 * torch.randn_like(tensor) - 2.0)
            elif name.endswith("conv1d.weight"):  # else the norm behind it magnifies rounding
                tensor.mul_(3.0)
            elif name.endswith("layer_scalar"):
                tensor.copy_(1.0 + 0.2 * torch.randn_like(tensor))
            elif name.endswith("sinks"):  # the gradient of a low one is mostly rounding
                tensor.copy_(2.0 + 0.3 * torch.randn_like(tensor))
    if config_class:
        _saved_as(model, model_type)
    if model_type == "qwen3_5_moe":  # published with stacked experts, which transformers writes one by one
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    return model


def _saved_as(model: Any, model_type: str) -> None:
    """Have the model's config.json name a family that transformers does not know, with rope settings as published."""

    def save_pretrained(self: Any, path: Path) -> None:
        type(self).save_pretrained(self, path)
        config = Path(path) / "config.json"
        values = json.loads(config.read_text())
        rope = values.pop("rope_parameters")
        values |= {"model_type": model_type, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        rope["type"] = rope.pop("rope_type")
        config.write_text(json.dumps(values))

    model.save_pretrained = MethodType(save_pretrained, model)  # a copy of the model has one of its own


def save(family: str, path: Path, *, seed: int = 0, **changes: Any) -> Path:
    hf_model(family, seed=seed, **changes).save_pretrained(path)
    return path
