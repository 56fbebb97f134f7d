"""Granite 3, dense: Llama's layers with multipliers.

Source: ``transformers/models/granite/modeling_granite.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import ATTENTION, EMBEDDING, MLP, OUTPUT, VLLM_ATTENTION, VLLM_MLP
from megarl.weights.architectures.table import Architecture, MultiplierKeys

GRANITE = Architecture(
    name="granite",
    models="Granite 3, dense",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    has_score_class=False,
    multipliers=MultiplierKeys(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits="logits_scaling",
    ),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
