"""gpt-oss: attention windows and sinks, biases everywhere, stacked experts with interleaved gate and up.

Source: ``transformers/models/gpt_oss/modeling_gpt_oss.py``; names from ``vllm/model_executor/models/gpt_oss.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    BIASED_ROUTER,
    EMBEDDING,
    JOINED_PAIRED_EXPERTS,
    OUT_BIAS,
    OUTPUT,
    PAIRED_EXPERTS,
    QKV_BIAS,
    SINKS,
    VLLM_ATTENTION,
    VLLM_PAIRED_EXPERTS,
    VLLM_QKV_BIAS,
    mlp_norm,
)
from megarl.weights.architectures.table import Architecture, Fused, LayerRules, Op, RouterRules, Stage

GPT_OSS = Architecture(
    name="gpt_oss",
    models="gpt-oss",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *QKV_BIAS,
        *OUT_BIAS,
        *SINKS,
        *mlp_norm(Stage.MOE),
        *BIASED_ROUTER,
        *PAIRED_EXPERTS,
        *OUTPUT,
    ),
    vllm=(
        *(Fused(row.vllm.replace("self_attn", "attn"), row.op, row.hf) for row in (*VLLM_ATTENTION, *VLLM_QKV_BIAS)),
        Fused("attn.o_proj.weight", Op.SAME, ATTENTION[-1].hf),
        Fused("attn.o_proj.bias", Op.SAME, OUT_BIAS[0].hf),
        Fused("attn.sinks", Op.SAME, SINKS[0].hf),
        Fused("model.embedding.weight", Op.SAME, EMBEDDING[0].hf),
        *VLLM_PAIRED_EXPERTS,
    ),
    joined=JOINED_PAIRED_EXPERTS,
    vllm_ends_everywhere=True,
    layers=LayerRules(windows=True, every_second=True),
    router=RouterRules(norms_topk=True),
    fixed={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
    },
    megatron={"gated_linear_unit": False, "activation": "clamped_swiglu", "add_bias_linear": True},
    keys={"expert_ffn": ("intermediate_size",)},
)
