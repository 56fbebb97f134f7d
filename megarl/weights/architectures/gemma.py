"""Tables of Gemma 3 and Gemma 4, text."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    EMBEDDING,
    INPUT_NORM,
    MLP_NORM_OF_GEMMA,
    NORMS_AFTER,
    OUTPUT,
    QK_NORM,
    UNNORMED_ATTENTION,
    UNNORMED_MLP,
    VLLM_ATTENTION,
    VLLM_MLP,
    gated,
    gated_rows,
    same,
    vllm_gated,
)
from megarl.weights.architectures.table import (
    Architecture,
    Fused,
    LayerRules,
    Logical,
    MultiplierKeys,
    NormRules,
    Op,
    Param,
    Shard,
    Stage,
)

# Gemma 3, text: (1 + weight) norms before and after attention and MLP, and on each query and key head. Source:
# ``transformers/models/gemma3/modeling_gemma3.py``.
GEMMA3_TEXT = Architecture(
    name="gemma3_text",
    models="Gemma 3 (270M, 1B, text)",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *MLP_NORM_OF_GEMMA, *UNNORMED_MLP, *NORMS_AFTER, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    norms=NormRules(after=True, zero_centred=True),
    multipliers=MultiplierKeys(embedding_root="hidden_size", attention_root="query_pre_attn_scalar"),
    layers=LayerRules(windows=True, ropes=True),
    megatron={"activation": "gelu_tanh"},
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)


# Gemma 4, dense, text: Gemma 3's places of norms, with plain weights. Layers without a window have wider heads; their
# keys are the values too in 31B. The last layers of E2B and E4B take keys and values of earlier ones. Source:
# ``transformers/models/gemma4/modeling_gemma4.py``; vLLM 0.32 ``model_executor/models/gemma4.py`` has the projection of
# keys that are values twice.
_JOINT = (
    Logical("self_attn.q_proj.weight", "joint_q hidden", Shard.COLUMN),
    Logical("self_attn.k_proj.weight", "joint_kv hidden", Shard.COLUMN),
)
_APART = (
    Logical("self_attn.q_proj.weight", "apart_q hidden", Shard.COLUMN),
    Logical("self_attn.k_proj.weight", "apart_kv hidden", Shard.COLUMN),
    Logical("self_attn.v_proj.weight", "apart_kv hidden", Shard.COLUMN),
)
_O_PROJ = Logical("self_attn.o_proj.weight", "hidden global_q", Shard.ROW)
_NORMS = {x: Logical(f"self_attn.{x}_norm.weight", "global_head") for x in ("q", "k")}
_LATE_MLP = gated("mlp", "late_ffn")
_TO_INPUTS = Logical("model.per_layer_model_projection.weight", "layer_inputs hidden")
_LAYER_INPUTS = (
    same(
        "layer_inputs.embedding.weight",
        Logical("model.embed_tokens_per_layer.weight", "vocab layer_inputs", Shard.VOCAB),
        Stage.FIRST,
    ),
    same("layer_inputs.projection.weight", _TO_INPUTS, Stage.FIRST),
    same("layer_inputs.norm.weight", Logical("model.per_layer_projection_norm.weight", "layer_input"), Stage.FIRST),
)
_LAYER_INPUT = (
    same("mlp_bda.gate.gate.weight", Logical("per_layer_input_gate.weight", "layer_input hidden"), Stage.LAYER),
    same("mlp_bda.gate.projection.weight", Logical("per_layer_projection.weight", "hidden layer_input"), Stage.LAYER),
    same("mlp_bda.gate.norm.weight", Logical("post_per_layer_input_norm.weight", "gated_hidden"), Stage.LAYER),
)
_TAKING = [Logical("self_attn.q_proj.weight", f"{extent} hidden", Shard.COLUMN) for extent in ("q", "global_q")]

_ATTENTION = (
    *(replace(row, stage=Stage.WINDOWED) for row in (UNNORMED_ATTENTION[1], QK_NORM[0])),
    *(replace(row, stage=Stage.WINDOWED, shares=False) for row in (UNNORMED_ATTENTION[0], QK_NORM[1])),
    Param("self_attention.linear_q.weight", Op.SAME, (_TAKING[0],), Stage.WINDOWED, shares=True),
    Param("self_attention.linear_qkv.weight", Op.QK, _JOINT, Stage.GLOBAL, shares=False),
    Param("self_attention.linear_qkv.weight", Op.QKV, _APART, Stage.GLOBAL, shares=False),
    Param("self_attention.linear_q.weight", Op.SAME, (_TAKING[1],), Stage.GLOBAL, shares=True),
    same("self_attention.linear_proj.weight", _O_PROJ, Stage.GLOBAL),
    same("self_attention.q_layernorm.weight", _NORMS["q"], Stage.GLOBAL),
    replace(same("self_attention.k_layernorm.weight", _NORMS["k"], Stage.GLOBAL), shares=False),
)

GEMMA4_TEXT = Architecture(
    name="gemma4_text",
    models="Gemma 4 (E2B, E4B, 31B, text)",
    params=(
        *EMBEDDING,
        *_LAYER_INPUTS,
        *INPUT_NORM,
        *_ATTENTION,
        *MLP_NORM_OF_GEMMA,
        *(replace(row, shares=False) for row in UNNORMED_MLP),
        *(replace(row, shares=True) for row in gated_rows(_LATE_MLP, Stage.LAYER, "mlp")),
        *NORMS_AFTER,
        *_LAYER_INPUT,
        same("mlp_bda.scalar", Logical("layer_scalar", "labels"), Stage.LAYER),
        *OUTPUT,
    ),
    vllm=(
        *VLLM_ATTENTION,
        Fused("self_attn.qkv_proj.weight", Op.QKV, (*_JOINT, _JOINT[1])),
        Fused("self_attn.qkv_proj.weight", Op.QKV, _APART),
        *VLLM_MLP,
        *vllm_gated(_LATE_MLP, "mlp.gate_up_proj.weight"),
        Fused(_TO_INPUTS.name, Op.SAME, (_TO_INPUTS,), Shard.COLUMN),
    ),
    vllm_ends_everywhere=True,
    norms=NormRules(after=True, of_values=True, scaled=True),
    multipliers=MultiplierKeys(embedding_root="hidden_size", softcap="final_logit_softcapping"),
    layers=LayerRules(windows=True, ropes=True, partial_rotary=True),
    has_score_class=False,
    megatron={"activation": "gelu_tanh", "softmax_scale": 1.0},
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "enable_moe_block": False,
        "num_experts": None,
        "attn_logit_softcapping": None,
    },
)
