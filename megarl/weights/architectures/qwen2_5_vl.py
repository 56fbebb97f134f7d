"""Qwen2.5-VL, images only: Qwen2.5's layers, and a vision tower that turns image patches into embeddings.

The tower is not sharded. In Megatron the first stage's ranks have it, in vLLM all workers
(``mm_encoder_tp_mode=data``).

Source: ``transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py``; vLLM 0.32 ``model_executor/models/qwen2_5_vl.py``.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import linear
from megarl.weights.architectures.qwen2 import QWEN2
from megarl.weights.architectures.table import Architecture, Fused, LayerRules, Logical, Op, Param, Stage

BLOCK = "visual.blocks.{block}"


_GATE = linear(f"{BLOCK}.mlp.gate_proj", "vision_ffn vision_hidden")
_UP = linear(f"{BLOCK}.mlp.up_proj", "vision_ffn vision_hidden")
_TOWER = (
    Logical("visual.patch_embed.proj.weight", "vision_hidden channels temporal_patch patch patch"),
    Logical(f"{BLOCK}.norm1.weight", "vision_hidden"),
    *linear(f"{BLOCK}.attn.qkv", "vision_qkv vision_hidden"),
    *linear(f"{BLOCK}.attn.proj", "vision_hidden vision_hidden"),
    Logical(f"{BLOCK}.norm2.weight", "vision_hidden"),
    *_GATE,
    *_UP,
    *linear(f"{BLOCK}.mlp.down_proj", "vision_hidden vision_ffn"),
    Logical("visual.merger.ln_q.weight", "vision_hidden"),
    *linear("visual.merger.mlp.0", "merged merged"),
    *linear("visual.merger.mlp.2", "hidden merged"),
)

QWEN2_5_VL = Architecture(
    name="qwen2_5_vl",
    models="Qwen2.5-VL",
    # The tower is transformers' module, so its names equal those in the files.
    params=(*(Param(part.name, Op.SAME, (part,), Stage.VISION) for part in _TOWER), *QWEN2.params),
    vllm=(
        *QWEN2.vllm,
        Fused(f"{BLOCK}.mlp.gate_up_proj.weight", Op.CONCAT, (_GATE[0], _UP[0])),
        Fused(f"{BLOCK}.mlp.gate_up_proj.bias", Op.CONCAT, (_GATE[1], _UP[1])),
    ),
    vllm_text="language_model.",
    fixed={**QWEN2.fixed, "use_sliding_window": False},
    layers=LayerRules(window_switch=True),
    # transformers has no ...ForSequenceClassification for it; one built from its generic class saves these names.
    base_names=(("model.visual.", "visual."), ("model.language_model.", "model.")),
)
