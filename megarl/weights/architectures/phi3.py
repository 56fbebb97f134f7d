"""Phi-3 and Phi-4: Llama's layers, with fused tensors in the files.

Source: ``transformers/models/phi3/modeling_phi3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import JOINED_MLP, JOINED_QKV
from megarl.weights.architectures.llama import LLAMA
from megarl.weights.architectures.table import LayerRules

PHI3 = replace(
    LLAMA,
    name="phi3",
    models="Phi-3, Phi-4",
    joined=(JOINED_QKV, JOINED_MLP),
    layers=LayerRules(partial_rotary=True),
    fixed={"hidden_act": "silu"},
)
