"""Tables of ERNIE 4.5, dense and MoE."""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    MLP,
    OUTPUT,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    VLLM_SHARED_EXPERTS,
)
from megarl.weights.architectures.table import Architecture, JoinedTensor, RouterRules

# ERNIE 4.5, dense: Llama's layers with a rotary embedding of neighbouring pairs. Source:
# ``transformers/models/ernie4_5/modeling_ernie4_5.py``. ``docs/adding_a_model.md`` shows how it was made.
ERNIE4_5 = Architecture(
    name="ernie4_5",
    models="ERNIE 4.5, dense",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "use_bias": False},
    megatron={"rotary_interleaved": True},
    has_score_class=False,
)


# ERNIE 4.5 MoE: the dense model's attention; a router bias that only affects the choice of experts. Source:
# ``transformers/models/ernie4_5_moe/modeling_ernie4_5_moe.py``.
_BIAS = JoinedTensor("mlp.moe_statics.e_score_correction_bias", ("mlp.gate.e_score_correction_bias",), single=True)

ERNIE4_5_MOE = Architecture(
    name="ernie4_5_moe",
    models="ERNIE 4.5 with experts",
    params=(*EMBEDDING, *ATTENTION, *DENSE_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    joined=(_BIAS,),
    router=RouterRules(norms_topk=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
    megatron={"rotary_interleaved": True},
)
