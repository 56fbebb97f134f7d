"""Tables of Llama 2 and 3, and of dense families with Llama's layers: Phi-3, Granite, SmolLM3, Hunyuan."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    JOINED_MLP,
    JOINED_QKV,
    MLP,
    OUTPUT,
    QK_NORM_AFTER_ROPE,
    VLLM_ATTENTION,
    VLLM_MLP,
)
from megarl.weights.architectures.table import Architecture, LayerRules, MultiplierKeys, NormRules

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


# Granite 3, dense: Llama's layers with multipliers. Source: ``transformers/models/granite/modeling_granite.py``.
GRANITE = Architecture(
    name="granite",
    models="Granite 3, dense",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    has_score_class=False,
    multipliers=MultiplierKeys(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits="logits_scaling",
    ),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
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
