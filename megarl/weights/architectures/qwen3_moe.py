"""Qwen3-MoE: Qwen3's attention; experts in all layers or some, no shared expert.

Source: ``transformers/models/qwen3_moe/modeling_qwen3_moe.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    QK_NORM,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
)
from megarl.weights.architectures.table import Architecture, LayerRules

QWEN3_MOE = Architecture(
    name="qwen3_moe",
    models="Qwen3-MoE",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, *EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS),
    vllm_ends_everywhere=True,
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    layers=LayerRules(window_switch=True),
)
