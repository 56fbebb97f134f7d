"""OLMo 2: norms only after attention and MLP, and norms of queries and keys over all heads together.

Source: ``transformers/models/olmo2/modeling_olmo2.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    EMBEDDING,
    NORMS_AFTER,
    OUTPUT,
    UNNORMED_ATTENTION,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_MLP,
    WHOLE_QK_NORM,
)
from megarl.weights.architectures.table import Architecture, NormRules

OLMO2 = Architecture(
    name="olmo2",
    models="OLMo 2",
    params=(*EMBEDDING, *UNNORMED_ATTENTION, *WHOLE_QK_NORM, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(before=False, after=True, whole_width=True),
    fixed={"hidden_act": "silu", "attention_bias": False},
)
