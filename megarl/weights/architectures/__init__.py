"""One table per model family: the only source of names and shapes of weights in megarl."""

from __future__ import annotations

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import megatron_config
from megarl.weights.architectures.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    KIMI_K2,
    SOLAR_OPEN,
)
from megarl.weights.architectures.ernie import ERNIE4_5, ERNIE4_5_MOE
from megarl.weights.architectures.exaone import EXAONE4, EXAONE_MOE
from megarl.weights.architectures.gemma import GEMMA3_TEXT, GEMMA4_TEXT
from megarl.weights.architectures.gpt_oss import GPT_OSS
from megarl.weights.architectures.granite import GRANITE, GRANITEMOE, GRANITEMOESHARED
from megarl.weights.architectures.lfm2 import LFM2
from megarl.weights.architectures.llama import (
    HUNYUAN_V1_DENSE,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI3,
    SMOLLM3,
)
from megarl.weights.architectures.minimax_m2 import MINIMAX_M2
from megarl.weights.architectures.qwen import (
    QWEN2,
    QWEN2_5_VL,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_VL,
    QWEN3_5_VL,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    SEED_OSS,
)
from megarl.weights.architectures.table import Architecture, Head, HFConfig, ModelSizes, Shape

__all__ = ["ARCHITECTURES", "Architecture", "HFConfig", "Head", "ModelSizes", "Shape", "architecture"]

ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ernie4_5": ERNIE4_5,
    "qwen2": QWEN2,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "deepseek_v2": DEEPSEEK_V2,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "dots1": DOTS1,
    "solar_open": SOLAR_OPEN,
    "qwen2_moe": QWEN2_MOE,
    "granite": GRANITE,
    "granitemoe": GRANITEMOE,
    "granitemoeshared": GRANITEMOESHARED,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "olmo3": OLMO3,
    "ministral3": MINISTRAL3,
    "exaone4": EXAONE4,
    "exaone_moe": EXAONE_MOE,
    "olmoe": OLMOE,
    "minimax_m2": MINIMAX_M2,
    "hunyuan_v1_dense": HUNYUAN_V1_DENSE,
    "phi3": PHI3,
    "glm4": GLM4,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "gpt_oss": GPT_OSS,
    "lfm2": LFM2,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl": QWEN3_VL,
    "qwen3_5": QWEN3_5_VL,
    "qwen3_5_moe": QWEN3_5_MOE_VL,
}
"""``model_type`` in config.json -> table."""
_WITH_TOWER = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral or ministral3"}
"""``model_type`` of models with a vision tower that megarl does not support -> that of their language models."""


def architecture(hf_config: HFConfig, head: Head = "lm") -> Architecture:
    """Return the table for a parsed config.json, checked against it; ``head="score"``: of a critic or reward model.

    Raises ArchitectureError for a family without a table (or without a score class), or an unsupported setting.
    """
    model_type = hf_config.get("model_type")
    found = ARCHITECTURES.get(str(model_type))
    if found is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        if inner := _WITH_TOWER.get(str(model_type)):
            raise ArchitectureError(
                f"model_type={model_type!r} has no table: megarl does not support its vision tower; take out the "
                f"language model ({inner}) with the code in docs/experiments.md#language-models"
            )
        raise ArchitectureError(
            f"model_type={model_type!r} has no table; supported: {supported}. Use such a checkpoint, or add a table to "
            "megarl/weights/architectures/"
        )
    if head == "score":
        found = found.with_score()
    megatron_config.check(found, hf_config)
    return found
