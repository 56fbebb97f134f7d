"""Solar Open: Llama's attention, then DeepSeek-V3's experts in every layer.

Source: ``transformers/models/solar_open/modeling_solar_open.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    vllm_shared_experts_of_transformers,
)
from megarl.weights.architectures.table import Architecture, LayerRules, RouterRules

SOLAR_OPEN = Architecture(
    name="solar_open",
    models="Solar Open",
    params=(*EMBEDDING, *ATTENTION, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_EXPERTS, *vllm_shared_experts_of_transformers()),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(partial_rotary=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
    keys={"ffn": ("moe_intermediate_size",)},
)
