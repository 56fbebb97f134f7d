"""Tables of GLM-4 to GLM-4.7."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    JOINED_MLP,
    MLP,
    MTP,
    OPTIONAL_QK_NORM,
    OPTIONAL_QKV_BIAS,
    OUTPUT,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    VLLM_OPTIONAL_QKV_BIAS,
    VLLM_QKV_BIAS,
    VLLM_SHARED_EXPERTS,
    norms_after,
)
from megarl.weights.architectures.deepseek import DEEPSEEK_V3
from megarl.weights.architectures.table import Architecture, LayerRules, NormRules, RouterRules

# GLM-4 of April 2025: norms before and after attention and MLP; RoPE rotates neighbouring pairs in half of each
# head. Source: ``transformers/models/glm4/modeling_glm4.py``.
GLM4 = Architecture(
    name="glm4",
    models="GLM-4 and GLM-Z1 (0414)",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *OPTIONAL_QKV_BIAS,
        *MLP,
        *norms_after("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
        *OUTPUT,
    ),
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
