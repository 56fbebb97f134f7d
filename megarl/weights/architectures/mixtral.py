"""Mixtral: Mistral's attention; experts in every layer, under different names.

Source: ``transformers/models/mixtral/modeling_mixtral.py`` and the published checkpoints' names.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    OUTPUT,
    VLLM_ATTENTION,
    expert_rows,
    gated,
    vllm_experts,
)
from megarl.weights.architectures.table import Architecture, Logical, RouterRules

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
