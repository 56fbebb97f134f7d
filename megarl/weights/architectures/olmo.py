"""Tables of OLMo 2, OLMo 3 and OLMoE; and of EXAONE 4, which has OLMo 2's layers."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    NORMS_AFTER,
    OUTPUT,
    QK_NORM,
    UNNORMED_ATTENTION,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    WHOLE_QK_NORM,
)
from megarl.weights.architectures.table import Architecture, LayerRules, NormRules

# OLMo 2: norms only after attention and MLP, and norms of queries and keys over all heads together. Source:
# ``transformers/models/olmo2/modeling_olmo2.py``; vLLM 0.32 runs it through transformers.
OLMO2 = Architecture(
    name="olmo2",
    models="OLMo 2",
    params=(*EMBEDDING, *UNNORMED_ATTENTION, *WHOLE_QK_NORM, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(before=False, after=True, whole_width=True),
    fixed={"hidden_act": "silu", "attention_bias": False},
)


# OLMo 3: OLMo 2's layers, most with a window; YaRN only in layers without one. Source:
# ``transformers/models/olmo3/modeling_olmo3.py``; vLLM 0.32 runs it through transformers.
OLMO3 = replace(OLMO2, name="olmo3", models="OLMo 3", layers=LayerRules(windows=True, ropes=True))


# OLMoE: Llama's layers with OLMo 2's norms of queries and keys, and softmax routing of experts. Source:
# ``transformers/models/olmoe/modeling_olmoe.py``. vLLM's ``olmo.py`` fixes the norms' epsilon, does not normalise
# the chosen probabilities and ties no weights. Other values in config.json are refused.
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


# EXAONE 4: OLMo 2's layers with Qwen3's norms of queries and keys; layers without a window have no rope. Source:
# ``transformers/models/exaone4/modeling_exaone4.py``.
EXAONE4 = Architecture(
    name="exaone4",
    models="EXAONE 4.0",
    params=(*EMBEDDING, *UNNORMED_ATTENTION, *QK_NORM, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(before=False, after=True),
    layers=LayerRules(windows=True, rope_in_windows=True),
    fixed={"hidden_act": "silu"},
)
