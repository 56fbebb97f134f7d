"""EXAONE 4: OLMo 2's layers with Qwen3's norms of queries and keys; layers without a window have no rope.

Source: ``transformers/models/exaone4/modeling_exaone4.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    EMBEDDING,
    NORMS_AFTER,
    OUTPUT,
    QK_NORM,
    UNNORMED_ATTENTION,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_MLP,
)
from megarl.weights.architectures.table import Architecture, LayerRules, NormRules

EXAONE4 = Architecture(
    name="exaone4",
    models="EXAONE 4.0",
    params=(*EMBEDDING, *UNNORMED_ATTENTION, *QK_NORM, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(before=False, after=True),
    layers=LayerRules(windows=True, rope_in_windows=True),
    fixed={"hidden_act": "silu"},
)
