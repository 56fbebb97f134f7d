"""Gemma 3, text: (1 + weight) norms before and after attention and MLP, and on each query and key head.

Source: ``transformers/models/gemma3/modeling_gemma3.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    MLP_NORM_OF_GEMMA,
    NORMS_AFTER,
    OUTPUT,
    QK_NORM,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_MLP,
)
from megarl.weights.architectures.table import Architecture, LayerRules, MultiplierKeys, NormRules

GEMMA3_TEXT = Architecture(
    name="gemma3_text",
    models="Gemma 3 (270M, 1B, text)",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *MLP_NORM_OF_GEMMA, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(after=True, zero_centred=True),
    multipliers=MultiplierKeys(embedding_root="hidden_size", attention_root="query_pre_attn_scalar"),
    layers=LayerRules(windows=True, ropes=True),
    megatron={"activation": "gelu_tanh"},
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)
