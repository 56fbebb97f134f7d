"""GLM-4.5, 4.6 and 4.7 (Air too): grouped queries with rope on half of a head, then DeepSeek-V3's experts.

Source: ``transformers/models/glm4_moe/modeling_glm4_moe.py``; multi-token prediction as in DeepSeek-V3.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    MTP,
    OPTIONAL_QK_NORM,
    OUTPUT,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    VLLM_QKV_BIAS,
    VLLM_SHARED_EXPERTS,
)
from megarl.weights.architectures.table import Architecture, LayerRules, RouterRules

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
