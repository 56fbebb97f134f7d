"""MiniMax-M2: norms over all heads, partial rotary heads, and experts chosen by sigmoid scores and a bias.

Source: ``transformers/models/minimax_m2/modeling_minimax_m2.py``; files use Mixtral's names.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    CUT_QK_NORM,
    EMBEDDING,
    OUTPUT,
    VLLM_ATTENTION,
    WHOLE_QK_NORM,
    expert_rows,
    gated,
    router_bias,
    vllm_experts,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, NormRules, RouterRules

_EXPERTS = gated("block_sparse_moe.experts.{expert}", "expert_ffn", names=("w1", "w3", "w2"))
_ROUTER = Logical("block_sparse_moe.gate.weight", "experts hidden")
_ROUTER_BIAS = Logical("block_sparse_moe.e_score_correction_bias", "experts", dtype="float32")

MINIMAX_M2 = Architecture(
    name="minimax_m2",
    models="MiniMax-M2",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *WHOLE_QK_NORM,
        *expert_rows(_EXPERTS, _ROUTER),
        *router_bias(_ROUTER_BIAS),
        *OUTPUT,
    ),
    vllm=(*VLLM_ATTENTION, *CUT_QK_NORM, *vllm_experts(_EXPERTS, "block_sparse_moe")),
    norms=NormRules(whole_width=True),
    router=RouterRules(sigmoid=True, norms_topk=True, unscaled=True),
    layers=LayerRules(partial_rotary=True),
    keys={"expert_ffn": ("intermediate_size",)},
    has_score_class=False,
    fixed={"hidden_act": "silu", "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "use_routing_bias": True},
)
