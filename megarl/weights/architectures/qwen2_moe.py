"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; experts plus a gated shared expert.

Source: ``transformers/models/qwen2_moe/modeling_qwen2_moe.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    QKV_BIAS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    VLLM_QKV_BIAS,
    gated,
    gated_rows,
    vllm_gated,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, Op, Param, Stage

_SHARED = gated("mlp.shared_expert", "shared_ffn")
_GATE = Logical("mlp.shared_expert_gate.weight", "labels hidden")

QWEN2_MOE = Architecture(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-MoE",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *QKV_BIAS,
        *DENSE_MLP,
        *EXPERTS,
        *gated_rows(_SHARED, Stage.MOE, "mlp.shared_experts"),
        Param("mlp.shared_experts.gate_weight", Op.SAME, (_GATE,), Stage.MOE),
        *OUTPUT,
    ),
    vllm=(
        *VLLM_ATTENTION,
        *VLLM_QKV_BIAS,
        *VLLM_MLP,
        *VLLM_EXPERTS,
        *vllm_gated(_SHARED, "mlp.shared_expert.gate_up_proj.weight"),
    ),
    fixed={"hidden_act": "silu", "qkv_bias": True},
    layers=LayerRules(windows=True, window_switch=True),
    megatron={"moe_shared_expert_gate": True},
    keys={"shared_ffn": ("shared_expert_intermediate_size",)},
)
