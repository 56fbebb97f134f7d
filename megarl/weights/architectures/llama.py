"""Tables of families with Llama's layers or close to them: Llama, Mistral and Mixtral, OLMo."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    JOINED_MLP,
    JOINED_QKV,
    MLP,
    NORMS_AFTER,
    OUTPUT,
    QK_NORM_AFTER_ROPE,
    UNNORMED_ATTENTION,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    WHOLE_QK_NORM,
    expert_rows,
    gated,
    vllm_experts,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, NormRules, RouterRules

# Llama 2 and 3: grouped queries without biases, RMSNorm, SwiGLU. Source:
# ``transformers/models/llama/modeling_llama.py``.
LLAMA = Architecture(
    name="llama",
    models="Llama 2 and 3",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)


# Phi-3 and Phi-4: Llama's layers, with fused tensors in the files. Source:
# ``transformers/models/phi3/modeling_phi3.py``.
PHI3 = replace(
    LLAMA,
    name="phi3",
    models="Phi-3, Phi-4",
    joined=(JOINED_QKV, JOINED_MLP),
    layers=LayerRules(partial_rotary=True),
    fixed={"hidden_act": "silu"},
)


# SmolLM3: grouped queries; every fourth layer or a list of layers has no rope. Source:
# ``transformers/models/smollm3/modeling_smollm3.py``; vLLM 0.32 runs it through transformers.
SMOLLM3 = Architecture(
    name="smollm3",
    models="SmolLM3",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    layers=LayerRules(rope="no_rope_layers", windows=True),
)


# Hunyuan, dense: Llama's layers with norms on each query and key head after rope. Source:
# ``transformers/models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py``; vLLM 0.32 runs it through transformers.
HUNYUAN_V1_DENSE = Architecture(
    name="hunyuan_v1_dense",
    models="Hunyuan 0.5B to 7B, dense",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM_AFTER_ROPE, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(after_rope=True),
    layers=LayerRules(rope_alpha=True),
    fixed={"hidden_act": "silu", "attention_bias": False},
)


# Mistral, dense, and the language model of Mistral Small 3: Llama's layers; the first version has windows. Source:
# ``transformers/models/mistral/modeling_mistral.py``.
MISTRAL = Architecture(
    name="mistral",
    models="Mistral 7B, Small 3 (text)",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu"},
)


# Ministral 3, text: Mistral's layers with YaRN, and queries scaled up with their position. Source:
# ``transformers/models/ministral3/modeling_ministral3.py``.
MINISTRAL3 = replace(MISTRAL, name="ministral3", models="Ministral 3, text", layers=LayerRules(queries_grow=True))


# Mixtral: Mistral's attention; experts in every layer, under different names. Source:
# ``transformers/models/mixtral/modeling_mixtral.py`` and the published checkpoints' names.
_EXPERTS = gated("block_sparse_moe.experts.{expert}", "expert_ffn", names=("w1", "w3", "w2"))
_ROUTER = Logical("block_sparse_moe.gate.weight", "experts hidden")

MIXTRAL = Architecture(
    name="mixtral",
    models="Mixtral",
    params=(*EMBEDDING, *ATTENTION, *expert_rows(_EXPERTS, _ROUTER), *OUTPUT),
    vllm=(*VLLM_ATTENTION, *vllm_experts(_EXPERTS, "block_sparse_moe")),
    vllm_ends_everywhere=True,
    router=RouterRules(norms_topk=True),
    fixed={"hidden_act": "silu"},
    keys={"expert_ffn": ("intermediate_size",)},
)


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
# ``transformers/models/olmoe/modeling_olmoe.py``. vLLM's ``llama.py`` fixes the norms' epsilon, does not normalise
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
