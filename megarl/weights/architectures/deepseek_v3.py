"""DeepSeek-V3 and R1: multi-head latent attention, dense first layers, then experts with a shared one and a router
bias.

Source: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``; multi-token prediction: the published checkpoint's
``model.layers.61`` and Megatron-Core's ``transformer/multi_token_prediction.py``. Its copies of embedding and output
weights are the model's own and are not kept twice.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    LATENT_ATTENTION,
    OUTPUT,
    VLLM_EXPERTS,
    VLLM_LATENT_ATTENTION,
    VLLM_MLP,
    gated,
    gated_rows,
    vllm_gated,
)
from megarl.weights.architectures.table import Architecture, Logical, Op, Param, Shard, Stage

_ROUTER_BIAS = Logical("mlp.gate.e_score_correction_bias", "experts", dtype="float32")
_SHARED = gated("mlp.shared_experts", "shared_ffn")
_MTP = (
    Param("enorm.weight", Op.SAME, (Logical("enorm.weight", "hidden"),), Stage.MTP),
    Param("hnorm.weight", Op.SAME, (Logical("hnorm.weight", "hidden"),), Stage.MTP),
    Param("eh_proj.weight", Op.SAME, (Logical("eh_proj.weight", "hidden two_hidden", Shard.COLUMN),), Stage.MTP),
    Param("final_layernorm.weight", Op.SAME, (Logical("shared_head.norm.weight", "hidden"),), Stage.MTP),
)

DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    params=(
        *EMBEDDING,
        *LATENT_ATTENTION,
        *DENSE_MLP,
        *EXPERTS,
        Param("mlp.router.expert_bias", Op.SAME, (_ROUTER_BIAS,), Stage.MOE),
        *gated_rows(_SHARED, Stage.MOE, "mlp.shared_experts"),
        *_MTP,
        *OUTPUT,
    ),
    vllm=(
        *VLLM_LATENT_ATTENTION,
        *VLLM_MLP,
        *VLLM_EXPERTS,
        *vllm_gated(_SHARED, "mlp.shared_experts.gate_up_proj.weight"),
    ),
    sigmoid_router=True,
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)
