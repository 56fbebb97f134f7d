"""OLMoE: Llama's layers with OLMo 2's norms of queries and keys, and softmax routing of experts.

Source: ``transformers/models/olmoe/modeling_olmoe.py``. vLLM's ``olmoe.py`` fixes the norms' epsilon, does not
normalise the chosen probabilities and ties no weights. Other values in config.json are refused.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    WHOLE_QK_NORM,
)
from megarl.weights.architectures.table import Architecture, NormRules

OLMOE = Architecture(
    name="olmoe",
    models="OLMoE",
    params=(*EMBEDDING, *ATTENTION, *WHOLE_QK_NORM, *EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_EXPERTS),
    vllm_ends_everywhere=True,
    norms=NormRules(whole_width=True),
    keys={"expert_ffn": ("intermediate_size",)},
    has_score_class=False,
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
)
