"""Tables of EXAONE 4.0, and of K-EXAONE, which has experts."""

from __future__ import annotations

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    NORMS_AFTER,
    OUTPUT,
    QK_NORM,
    SHARED_EXPERTS,
    UNNORMED_ATTENTION,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_EXPERTS,
    VLLM_MLP,
    VLLM_SHARED_EXPERTS,
    router_bias,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, NormRules, RouterRules

# EXAONE 4: OLMo 2's layers with Qwen3's norms of queries and keys; layers without a window have no rope. Source:
# ``transformers/models/exaone4/modeling_exaone4.py``.
EXAONE4 = Architecture(
    name="exaone4",
    models="EXAONE 4.0",
    params=(*EMBEDDING, *UNNORMED_ATTENTION, *QK_NORM, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(before=False, after=True),
    layers=LayerRules(windows=True, rope_in_windows=True),
    fixed={"hidden_act": "silu"},
)


# K-EXAONE: EXAONE 4's windows, ropes and norms of queries and keys, with norms before attention and MLP; then
# DeepSeek-V3's router, whose bias is beside it, and shared experts. Source:
# ``transformers/models/exaone_moe/modeling_exaone_moe.py``. vLLM reads more keys, which transformers ignores.
_BIAS = Logical("mlp.e_score_correction_bias", "experts", dtype="float32")

EXAONE_MOE = Architecture(
    name="exaone_moe",
    models="K-EXAONE",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, *EXPERTS, *router_bias(_BIAS), *SHARED_EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_SHARED_EXPERTS),
    router=RouterRules(sigmoid=True),
    layers=LayerRules(windows=True, rope_in_windows=True, kinds="mlp_layer_types"),
    has_score_class=False,
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "bias": False,
        "mlp_bias": False,
        "swiglu_limits": None,
        "sliding_windows": None,
        "logit_scale": 1.0,
        "scoring_func": "sigmoid",
    },
)
