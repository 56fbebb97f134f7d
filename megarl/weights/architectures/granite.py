"""Tables of Granite 3: dense, with experts, and with a shared expert."""

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
    gated_rows,
    vllm_experts,
    vllm_gated,
)
from megarl.weights.architectures.table import (
    Architecture,
    Fused,
    JoinedTensor,
    Logical,
    MultiplierKeys,
    Op,
    RouterRules,
    Stage,
)

# Granite 3, dense: Llama's layers with multipliers. Source: ``transformers/models/granite/modeling_granite.py``. vLLM
# reads three more keys, which transformers ignores.
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
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "layer_types": None,
        "layer_rope_theta": None,
        "attention_sinks": False,
    },
)


# Granite 3 with experts: the dense model's attention and multipliers; stacked experts, with the router's softmax over
# the chosen ones. Source: ``transformers/models/granitemoe/modeling_granitemoe.py``.
_MOE = "block_sparse_moe"
_EXPERTS = gated(f"{_MOE}.experts.{{expert}}", "expert_ffn")
_ROUTER = Logical(f"{_MOE}.router.layer.weight", "experts hidden")

GRANITEMOE = replace(
    GRANITE,
    name="granitemoe",
    models="Granite 3 with experts",
    params=(*EMBEDDING, *ATTENTION, *expert_rows(_EXPERTS, _ROUTER), *OUTPUT),
    vllm=(*VLLM_ATTENTION, *vllm_experts(_EXPERTS, _MOE), Fused(f"{_MOE}.gate.weight", Op.SAME, (_ROUTER,))),
    joined=(
        JoinedTensor(f"{_MOE}.input_linear.weight", tuple(part.name for part in _EXPERTS[:2])),
        JoinedTensor(f"{_MOE}.output_linear.weight", (_EXPERTS[2].name,)),
    ),
    vllm_ends_everywhere=True,
    router=RouterRules(norms_topk=True),
    keys={"expert_ffn": ("intermediate_size",)},
)


# Granite 3 with experts and a shared one beside them. Source:
# ``transformers/models/granitemoeshared/modeling_granitemoeshared.py``.
_SHARED = gated("shared_mlp", "shared_ffn", names=("gate_proj", "up_proj", "output_linear"))

GRANITEMOESHARED = replace(
    GRANITEMOE,
    name="granitemoeshared",
    models="Granite 3 with a shared expert",
    params=(*GRANITEMOE.params, *gated_rows(_SHARED, Stage.MOE, "mlp.shared_experts")),
    vllm=(*GRANITEMOE.vllm, *vllm_gated(_SHARED, "shared_mlp.input_linear.weight")),
    joined=(
        *GRANITEMOE.joined,
        JoinedTensor("shared_mlp.input_linear.weight", tuple(part.name for part in _SHARED[:2])),
    ),
    keys={**GRANITEMOE.keys, "shared_ffn": ("shared_intermediate_size",)},
)
