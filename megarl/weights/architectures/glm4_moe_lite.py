"""GLM-4.7-Flash: DeepSeek-V3's attention, experts and router; config.json lists the MoE layers.

Source: ``transformers/models/glm4_moe_lite/modeling_glm4_moe_lite.py``.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.deepseek_v3 import DEEPSEEK_V3
from megarl.weights.architectures.table import LayerRules

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    models="GLM-4.7-Flash",
    has_score_class=False,
    layers=LayerRules(kinds="mlp_layer_types"),
    fixed={"hidden_act": "silu", "attention_bias": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)
