"""Tables of Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    MLP,
    OUTPUT,
    VLLM_ATTENTION,
    VLLM_MLP,
    expert_rows,
    gated,
    vllm_experts,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, RouterRules

# Mistral, dense: Llama's layers; the first version has sliding-window attention. Source:
# ``transformers/models/mistral/modeling_mistral.py``.
MISTRAL = Architecture(
    name="mistral",
    models="Mistral 7B",
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
