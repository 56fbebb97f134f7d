"""Tables of DeepSeek-V2 and V3, of families that have DeepSeek-V3's layers, and of GLM-4 to GLM-4.7."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    JOINED_MLP,
    LATENT_ATTENTION,
    MLP,
    MTP,
    OPTIONAL_QK_NORM,
    OPTIONAL_QKV_BIAS,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SANDWICH_NORMS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_LATENT_ATTENTION,
    VLLM_MLP,
    VLLM_OPTIONAL_QKV_BIAS,
    VLLM_QKV_BIAS,
    VLLM_SHARED_EXPERTS,
    router_bias,
    vllm_shared_experts_of_transformers,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, NormRules, RouterRules

# DeepSeek-V3 and R1: multi-head latent attention, dense first layers, then routed and shared experts, router bias.
# Source: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``; multi-token prediction: the published
# checkpoint's ``model.layers.61`` and Megatron-Core's ``transformer/multi_token_prediction.py``. Its copies of
# embedding and output weights equal the model's and are dropped.
DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    models="DeepSeek-V3 and R1",
    params=(*EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *MTP, *OUTPUT),
    vllm=(*VLLM_LATENT_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    router=RouterRules(sigmoid=True),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)


# DeepSeek-V2-Lite and Coder-V2-Lite: DeepSeek-V3's attention; softmax routing, shared experts. Source:
# ``transformers/models/deepseek_v2/modeling_deepseek_v2.py``. The large V2 chooses groups by their best expert,
# which Megatron-Core does not support.
DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    models="DeepSeek-V2-Lite, Coder-V2-Lite",
    params=(*EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_LATENT_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    router=RouterRules(scales_topk=True),
    fixed={
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
    },
)


# Kimi K2: DeepSeek-V3 under another ``model_type``, unknown to transformers.
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2", models="Kimi K2", config_class="deepseek_v3", has_score_class=False)


# dots.llm1: Qwen3's attention, then DeepSeek-V3's experts. Source: ``transformers/models/dots1/modeling_dots1.py``;
# vLLM 0.32 runs it through transformers.
_ROUTER_BIAS = Logical("mlp.gate.e_score_correction_bias", "experts")
"""Router bias in the model's dtype, as in transformers' module, which vLLM runs."""

DOTS1 = Architecture(
    name="dots1",
    models="dots.llm1",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *QK_NORM,
        *DENSE_MLP,
        *EXPERTS,
        *router_bias(_ROUTER_BIAS),
        *SHARED_EXPERTS,
        *OUTPUT,
    ),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *vllm_shared_experts_of_transformers(_ROUTER_BIAS)),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(windows=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
)


# Solar Open: Llama's attention, then DeepSeek-V3's experts in every layer. Source:
# ``transformers/models/solar_open/modeling_solar_open.py``; vLLM 0.32 runs it through transformers.
SOLAR_OPEN = Architecture(
    name="solar_open",
    models="Solar Open",
    params=(*EMBEDDING, *ATTENTION, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_EXPERTS, *vllm_shared_experts_of_transformers()),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(partial_rotary=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
    keys={"ffn": ("moe_intermediate_size",)},
)


# GLM-4 of April 2025: norms before and after attention and MLP; RoPE rotates neighbouring pairs in half of each
# head. Source: ``transformers/models/glm4/modeling_glm4.py``.
GLM4 = Architecture(
    name="glm4",
    models="GLM-4 and GLM-Z1 (0414)",
    params=(*EMBEDDING, *ATTENTION, *OPTIONAL_QKV_BIAS, *MLP, *SANDWICH_NORMS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_OPTIONAL_QKV_BIAS, *VLLM_MLP),
    joined=(JOINED_MLP,),
    layers=LayerRules(partial_rotary=True),
    norms=NormRules(after=True),
    fixed={"hidden_act": "silu"},
    megatron={"rotary_interleaved": True},
)


# GLM-4.5, 4.6 and 4.7 (Air too): grouped queries with rope on half of a head, then DeepSeek-V3's experts. Source:
# ``transformers/models/glm4_moe/modeling_glm4_moe.py``; multi-token prediction as in DeepSeek-V3.
GLM4_MOE = Architecture(
    name="glm4_moe",
    models="GLM-4.5 to 4.7, Air",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *QKV_BIAS,
        *OPTIONAL_QK_NORM,
        *DENSE_MLP,
        *EXPERTS,
        *ROUTER_BIAS,
        *SHARED_EXPERTS,
        *MTP,
        *OUTPUT,
    ),
    vllm=(*VLLM_ATTENTION, *VLLM_QKV_BIAS, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(partial_rotary=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": True},
)


# GLM-4.7-Flash: DeepSeek-V3's attention, experts and router; config.json lists the MoE layers. Source:
# ``transformers/models/glm4_moe_lite/modeling_glm4_moe_lite.py``.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    models="GLM-4.7-Flash",
    has_score_class=False,
    layers=LayerRules(kinds="mlp_layer_types"),
    fixed={"hidden_act": "silu", "attention_bias": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)
