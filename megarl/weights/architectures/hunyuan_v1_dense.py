"""Hunyuan, dense: Llama's layers with norms on each query and key head after rope.

Source: ``transformers/models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    MLP,
    OUTPUT,
    QK_NORM_AFTER_ROPE,
    VLLM_ATTENTION,
    VLLM_MLP,
)
from megarl.weights.architectures.table import Architecture, LayerRules, NormRules

HUNYUAN_V1_DENSE = Architecture(
    name="hunyuan_v1_dense",
    models="Hunyuan 0.5B to 7B, dense",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM_AFTER_ROPE, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(after_rope=True),
    layers=LayerRules(rope_alpha=True),
    fixed={"hidden_act": "silu", "attention_bias": False},
)
