"""dots.llm1: Qwen3's attention, then experts as DeepSeek-V3 has them.

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
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    VLLM_SHARED_EXPERTS_OF_TRANSFORMERS,
)
from megarl.weights.architectures.table import Architecture, LayerRules, RouterRules

DOTS1 = Architecture(
    name="dots1",
    models="dots.llm1",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS_OF_TRANSFORMERS),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(windows=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
)
