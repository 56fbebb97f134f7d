"""DeepSeek-V2-Lite and Coder-V2-Lite: DeepSeek-V3's attention; softmax routing, shared experts.

Source: ``transformers/models/deepseek_v2/modeling_deepseek_v2.py``. The large V2 chooses groups by their best expert,
which Megatron-Core does not support.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    LATENT_ATTENTION,
    OUTPUT,
    SHARED_EXPERTS,
    VLLM_EXPERTS,
    VLLM_LATENT_ATTENTION,
    VLLM_MLP,
    VLLM_SHARED_EXPERTS,
)
from megarl.weights.architectures.table import Architecture, RouterRules

DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    models="DeepSeek-V2-Lite, Coder-V2-Lite",
    params=(*EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_LATENT_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    router=RouterRules(scales_topk=True),
    fixed={
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
    },
)
