"""Llama 2 and 3: grouped queries without biases, RMSNorm, SwiGLU. Source:
``transformers/models/llama/modeling_llama.py``."""

from __future__ import annotations

from megarl.weights.architectures.blocks import ATTENTION, EMBEDDING, MLP, OUTPUT, VLLM_ATTENTION, VLLM_MLP
from megarl.weights.architectures.table import Architecture

LLAMA = Architecture(
    name="llama",
    models="Llama 2 and 3",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
