"""Seed-OSS: Qwen2's biases of queries, keys and values on grouped queries.

Source: ``transformers/models/seed_oss/modeling_seed_oss.py``; vLLM 0.32 runs it through transformers.
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
from megarl.weights.architectures.table import Architecture

SEED_OSS = Architecture(
    name="seed_oss",
    models="Seed-OSS",
    params=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_QKV_BIAS, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
)
