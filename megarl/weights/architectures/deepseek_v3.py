"""DeepSeek-V3 and R1: multi-head latent attention, dense first layers, then routed and shared experts, router bias.

Source: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``; multi-token prediction: the published checkpoint's
``model.layers.61`` and Megatron-Core's ``transformer/multi_token_prediction.py``. Its copies of embedding and output
weights equal the model's and are dropped.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    LATENT_ATTENTION,
    MTP,
    OUTPUT,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_EXPERTS,
    VLLM_LATENT_ATTENTION,
    VLLM_MLP,
    VLLM_SHARED_EXPERTS,
)
from megarl.weights.architectures.table import Architecture, RouterRules

DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    models="DeepSeek-V3 and R1",
    params=(*EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *MTP, *OUTPUT),
    vllm=(*VLLM_LATENT_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    router=RouterRules(sigmoid=True),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)
