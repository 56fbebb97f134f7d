"""Mistral, dense: Llama's layers; the first version has sliding-window attention.

Source: ``transformers/models/mistral/modeling_mistral.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import ATTENTION, EMBEDDING, MLP, OUTPUT, VLLM_ATTENTION, VLLM_MLP
from megarl.weights.architectures.table import Architecture

MISTRAL = Architecture(
    name="mistral",
    models="Mistral 7B",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu"},
)
