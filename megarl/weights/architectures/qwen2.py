"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on queries, keys and values.

Source: ``transformers/models/qwen2/modeling_qwen2.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    MLP,
    OUTPUT,
    QKV_BIAS,
    VLLM_ATTENTION,
    VLLM_MLP,
    VLLM_QKV_BIAS,
)
from megarl.weights.architectures.table import Architecture, LayerRules

QWEN2 = Architecture(
    name="qwen2",
    models="Qwen2 and 2.5",
    params=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_QKV_BIAS, *VLLM_MLP),
    fixed={"hidden_act": "silu"},
    layers=LayerRules(windows=True, window_switch=True),
)
