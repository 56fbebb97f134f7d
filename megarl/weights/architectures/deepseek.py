"""Tables of DeepSeek-V2 and V3, and of families that have DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    LATENT_ATTENTION,
    MTP,
    OUTPUT,
    QK_NORM,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_LATENT_ATTENTION,
    VLLM_MLP,
    VLLM_SHARED_EXPERTS,
    router_bias,
    vllm_shared_experts_of_transformers,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, RouterRules

# DeepSeek-V3 and R1: multi-head latent attention, dense first layers, then routed and shared experts, router bias.
# Source: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``; multi-token prediction: the published
# checkpoint's ``model.layers.61`` and Megatron-Core's ``transformer/multi_token_prediction.py``. Its copies of
# embedding and output weights equal the model's and are dropped.
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


# DeepSeek-V2-Lite and Coder-V2-Lite: DeepSeek-V3's attention; softmax routing, shared experts. Source:
# ``transformers/models/deepseek_v2/modeling_deepseek_v2.py``. The large V2 chooses groups by their best expert,
# which Megatron-Core does not support.
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


# Kimi K2: DeepSeek-V3 under another ``model_type``, unknown to transformers.
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2", models="Kimi K2", config_class="deepseek_v3", has_score_class=False)


# dots.llm1: Qwen3's attention, then DeepSeek-V3's experts. Source: ``transformers/models/dots1/modeling_dots1.py``;
# vLLM 0.32 runs it through transformers.
_ROUTER_BIAS = Logical("mlp.gate.e_score_correction_bias", "experts")
"""Router bias in the model's dtype, as in transformers' module, which vLLM runs."""

DOTS1 = Architecture(
    name="dots1",
    models="dots.llm1",
    params=(
        *EMBEDDING,
        *ATTENTION,
        *QK_NORM,
        *DENSE_MLP,
        *EXPERTS,
        *router_bias(_ROUTER_BIAS),
        *SHARED_EXPERTS,
        *OUTPUT,
    ),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *vllm_shared_experts_of_transformers(_ROUTER_BIAS)),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(windows=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
)


# Solar Open: Llama's attention, then DeepSeek-V3's experts in every layer. Source:
# ``transformers/models/solar_open/modeling_solar_open.py``; vLLM 0.32 runs it through transformers.
SOLAR_OPEN = Architecture(
    name="solar_open",
    models="Solar Open",
    params=(*EMBEDDING, *ATTENTION, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_EXPERTS, *vllm_shared_experts_of_transformers()),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(partial_rotary=True),
    has_score_class=False,
    fixed={"hidden_act": "silu", "attention_bias": False},
    keys={"ffn": ("moe_intermediate_size",)},
)
