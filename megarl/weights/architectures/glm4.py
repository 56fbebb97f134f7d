"""GLM-4 of April 2025: norms before and after attention and MLP; RoPE rotates neighbouring pairs in half of each head.

Source: ``transformers/models/glm4/modeling_glm4.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    JOINED_MLP,
    MLP,
    OPTIONAL_QKV_BIAS,
    OUTPUT,
    VLLM_ATTENTION,
    VLLM_MLP,
    VLLM_OPTIONAL_QKV_BIAS,
    norms_after,
)
from megarl.weights.architectures.table import Architecture, LayerRules, NormRules

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
