"""Qwen3, dense: grouped queries without biases, RMSNorm on each query and key head, SwiGLU, tied or untied output.

Source: ``transformers/models/qwen3/modeling_qwen3.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import ATTENTION, EMBEDDING, MLP, OUTPUT, QK_NORM, VLLM_ATTENTION, VLLM_MLP
from megarl.weights.architectures.table import Architecture, LayerRules

QWEN3 = Architecture(
    name="qwen3",
    models="Qwen3",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": False},
    layers=LayerRules(windows=True, window_switch=True),
)
