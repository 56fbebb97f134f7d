"""dots.llm1: Qwen3's attention, then DeepSeek-V3's experts.

Source: ``transformers/models/dots1/modeling_dots1.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    QK_NORM,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    router_bias,
    vllm_shared_experts_of_transformers,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, RouterRules

_ROUTER_BIAS = Logical("mlp.gate.e_score_correction_bias", "experts")
"""Router bias in the model's dtype, as in transformers' module, which vLLM runs."""

DOTS1 = Architecture(
    name="dots1",
    models="dots.llm1",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *QK_NORM,
        *DENSE_MLP,
        *EXPERTS,
        *router_bias(_ROUTER_BIAS),
        *SHARED_EXPERTS,
        *OUTPUT,
    ),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *vllm_shared_experts_of_transformers(_ROUTER_BIAS)),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(windows=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
)
