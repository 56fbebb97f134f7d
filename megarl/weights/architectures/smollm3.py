"""SmolLM3: grouped queries; every fourth layer or a list of layers has no rope.

Source: ``transformers/models/smollm3/modeling_smollm3.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import ATTENTION, EMBEDDING, MLP, OUTPUT, VLLM_ATTENTION, VLLM_MLP
from megarl.weights.architectures.table import Architecture, LayerRules

SMOLLM3 = Architecture(
    name="smollm3",
    models="SmolLM3",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    layers=LayerRules(rope="no_rope_layers", windows=True),
)
