"""Tables of Qwen2, Qwen2.5 and Qwen3, dense, MoE and with images; and of Seed-OSS, which has Qwen2's tensors."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    ATTENTION,
    DELTA_NET,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    INNER_NAMES,
    INPUT_NORM,
    JOINED_CONVOLUTION,
    JOINED_DELTA_QKV,
    JOINED_EXPERTS,
    JOINED_GROUPS,
    MLP,
    MTP_BESIDE,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    VLLM_ATTENTION,
    VLLM_DELTA_NET,
    VLLM_EXPERTS,
    VLLM_GATED_ATTENTION,
    VLLM_GATED_SHARED_EXPERT,
    VLLM_GROUPED_DELTA_NET,
    VLLM_MLP,
    VLLM_QKV_BIAS,
    layer_norm,
    linear,
    same,
)
from megarl.weights.architectures.table import (
    Architecture,
    Fused,
    LayerRules,
    Logical,
    NormRules,
    Op,
    Param,
    PredictionRules,
    RouterRules,
    Stage,
)

# Qwen2 and Qwen2.5, dense: Llama's layers with biases on queries, keys and values. Source:
# ``transformers/models/qwen2/modeling_qwen2.py``.
QWEN2 = Architecture(
    name="qwen2",
    models="Qwen2 and 2.5",
    params=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_QKV_BIAS, *VLLM_MLP),
    fixed={"hidden_act": "silu"},
    layers=LayerRules(windows=True, window_switch=True),
)


# Qwen3, dense: grouped queries without biases, RMSNorm on each query and key head, SwiGLU, tied or untied output.
# Source: ``transformers/models/qwen3/modeling_qwen3.py``.
QWEN3 = Architecture(
    name="qwen3",
    models="Qwen3",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "attention_bias": False},
    layers=LayerRules(windows=True, window_switch=True),
)


# Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; experts plus a gated shared expert. Source:
# ``transformers/models/qwen2_moe/modeling_qwen2_moe.py``.
QWEN2_MOE = Architecture(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-MoE",
    params=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *DENSE_MLP, *EXPERTS, *GATED_SHARED_EXPERT, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_QKV_BIAS, *VLLM_MLP, *VLLM_EXPERTS, *VLLM_GATED_SHARED_EXPERT),
    fixed={"hidden_act": "silu", "qkv_bias": True},
    layers=LayerRules(windows=True, window_switch=True),
    megatron={"moe_shared_expert_gate": True},
    keys={"shared_ffn": ("shared_expert_intermediate_size",)},
)


# Qwen3-MoE: Qwen3's attention; experts in all layers or some, no shared expert. Source:
# ``transformers/models/qwen3_moe/modeling_qwen3_moe.py``.
QWEN3_MOE = Architecture(
    name="qwen3_moe",
    models="Qwen3-MoE",
    params=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, *EXPERTS, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP, *VLLM_EXPERTS),
    vllm_ends_everywhere=True,
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    layers=LayerRules(window_switch=True),
)


# Qwen2.5-VL, images only: Qwen2.5's layers, and a vision tower that turns image patches into embeddings. The tower
# is not sharded. In Megatron the first stage's ranks have it, in vLLM all workers (``mm_encoder_tp_mode=data``).
# Source: ``transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py``; vLLM 0.32
# ``model_executor/models/qwen2_5_vl.py``.
BLOCK = "visual.blocks.{block}"
_PATCHES = "vision_hidden channels temporal_patch patch patch"


_TOWER_GATE = linear(f"{BLOCK}.mlp.gate_proj", "vision_ffn vision_hidden")
_TOWER_UP = linear(f"{BLOCK}.mlp.up_proj", "vision_ffn vision_hidden")
_TOWER = (
    Logical("visual.patch_embed.proj.weight", _PATCHES),
    Logical(f"{BLOCK}.norm1.weight", "vision_hidden"),
    *linear(f"{BLOCK}.attn.qkv", "vision_qkv vision_hidden"),
    *linear(f"{BLOCK}.attn.proj", "vision_hidden vision_hidden"),
    Logical(f"{BLOCK}.norm2.weight", "vision_hidden"),
    *_TOWER_GATE,
    *_TOWER_UP,
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
        Fused(f"{BLOCK}.mlp.gate_up_proj.weight", Op.CONCAT, (_TOWER_GATE[0], _TOWER_UP[0])),
        Fused(f"{BLOCK}.mlp.gate_up_proj.bias", Op.CONCAT, (_TOWER_GATE[1], _TOWER_UP[1])),
    ),
    vllm_text="language_model.",
    fixed={**QWEN2.fixed, "use_sliding_window": False},
    layers=LayerRules(window_switch=True),
    # transformers has no ...ForSequenceClassification for it; one built from its generic class saves these names.
    base_names=INNER_NAMES,
)


# Qwen3-VL, dense, images only: Qwen3's layers. The first ones add vectors of the tower's middle blocks (DeepStack,
# arXiv:2406.04334). Source: ``transformers/models/qwen3_vl/modeling_qwen3_vl.py``; vLLM 0.32
# ``model_executor/models/qwen3_vl.py``.
_LEVEL = "visual.deepstack_merger_list.{block}"
_TOWER_3 = (
    Logical("visual.patch_embed.proj.weight", _PATCHES),
    Logical("visual.patch_embed.proj.bias", "vision_hidden"),
    Logical("visual.pos_embed.weight", "vision_places vision_hidden"),
    *layer_norm(f"{BLOCK}.norm1", "vision_hidden"),
    *linear(f"{BLOCK}.attn.qkv", "vision_qkv vision_hidden"),
    *linear(f"{BLOCK}.attn.proj", "vision_hidden vision_hidden"),
    *layer_norm(f"{BLOCK}.norm2", "vision_hidden"),
    *linear(f"{BLOCK}.mlp.linear_fc1", "vision_ffn vision_hidden"),
    *linear(f"{BLOCK}.mlp.linear_fc2", "vision_hidden vision_ffn"),
    *layer_norm("visual.merger.norm", "vision_hidden"),
    *linear("visual.merger.linear_fc1", "merged merged"),
    *linear("visual.merger.linear_fc2", "hidden merged"),
)
_LEVELS = (
    *layer_norm(f"{_LEVEL}.norm", "merged"),
    *linear(f"{_LEVEL}.linear_fc1", "merged merged"),
    *linear(f"{_LEVEL}.linear_fc2", "hidden merged"),
)

QWEN3_VL = Architecture(
    name="qwen3_vl",
    models="Qwen3-VL",
    params=(
        *(same(part.name, part, Stage.VISION) for part in _TOWER_3),
        *(same(part.name, part, Stage.DEEPSTACK) for part in _LEVELS),
        *QWEN3.params,
    ),
    vllm=QWEN3.vllm,
    vllm_text="language_model.",
    fixed=QWEN3.fixed,
    layers=LayerRules(mrope_interleaved=True),
    has_score_class=False,
    base_names=replace(INNER_NAMES, in_files=True),
)


# Seed-OSS: Qwen2's tensors, under other settings. Source: ``transformers/models/seed_oss/modeling_seed_oss.py``;
# vLLM 0.32 runs it through transformers.
SEED_OSS = replace(
    QWEN2,
    name="seed_oss",
    models="Seed-OSS",
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
)


# Qwen3.5, text, dense: a gated delta net in most layers and gated attention in the others, zero-centred norms, a
# rotary embedding of a part of each head. The prediction layer is a layer with attention. Source:
# ``transformers/models/qwen3_5/modeling_qwen3_5.py``; prediction: vLLM 0.32 ``model_executor/models/qwen3_5_mtp.py``.
_PREDICTION = PredictionRules("mtp_num_hidden_layers", beside=True)

QWEN3_5 = Architecture(
    name="qwen3_5_text",
    models="Qwen3.5, text",
    params=(*EMBEDDING, *INPUT_NORM, *GATED_ATTENTION, *DELTA_NET, *MLP, *MTP_BESIDE, *OUTPUT),
    vllm=(*VLLM_GATED_ATTENTION, *VLLM_DELTA_NET, *VLLM_MLP),
    joined=(JOINED_DELTA_QKV, JOINED_CONVOLUTION),
    fixed={"hidden_act": "silu", "attention_bias": False},
    layers=LayerRules(partial_rotary=True, prediction=_PREDICTION),
    norms=NormRules(zero_centred=True),
)


# Qwen3.5, text, with experts: those of Qwen2-MoE in every layer. Source:
# ``transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py``.
_VLLM_GATED_EXPERTS = (*VLLM_EXPERTS, *VLLM_GATED_SHARED_EXPERT)

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    models="Qwen3.5 with experts, text",
    params=(
        *EMBEDDING,
        *INPUT_NORM,
        *GATED_ATTENTION,
        *DELTA_NET,
        *EXPERTS,
        *GATED_SHARED_EXPERT,
        *MTP_BESIDE,
        *OUTPUT,
    ),
    vllm=(*VLLM_GATED_ATTENTION, *VLLM_DELTA_NET, *_VLLM_GATED_EXPERTS),
    router=RouterRules(norms_topk=True),
    has_score_class=False,
    megatron={"moe_shared_expert_gate": True},
    keys={"ffn": ("moe_intermediate_size",), "shared_ffn": ("shared_expert_intermediate_size",)},
)


# Qwen3.5 as published, dense and with experts, images only: Qwen3-VL's tower without DeepStack. Sources as of the text
# models; vLLM 0.32 ``model_executor/models/qwen3_5.py``.
_TOWER_3_5 = tuple(same(part.name, part, Stage.VISION) for part in _TOWER_3)

QWEN3_5_VL = replace(
    QWEN3_5,
    name="qwen3_5",
    models="Qwen3.5",
    params=(*_TOWER_3_5, *QWEN3_5.params),
    vllm_text="language_model.",
    layers=LayerRules(partial_rotary=True, mrope_interleaved=True, prediction=_PREDICTION),
    has_score_class=False,
    base_names=QWEN3_VL.base_names,
)

QWEN3_5_MOE_VL = replace(
    QWEN3_5_MOE,
    name="qwen3_5_moe",
    models="Qwen3.5 with experts",
    params=(*_TOWER_3_5, *QWEN3_5_MOE.params),
    vllm_text="language_model.",
    joined=(*QWEN3_5_MOE.joined, *JOINED_EXPERTS),
    layers=QWEN3_5_VL.layers,
    base_names=QWEN3_VL.base_names,
)


# Qwen3-Next: Qwen3.5's layers with experts, or one MLP in some; files with the rows of each key head together. Source:
# ``transformers/models/qwen3_next/modeling_qwen3_next.py``; prediction: vLLM 0.32
# ``model_executor/models/qwen3_next_mtp.py``, with one layer if config.json has no number of them.
QWEN3_NEXT = replace(
    QWEN3_5,
    name="qwen3_next",
    models="Qwen3-Next",
    params=(
        *EMBEDDING,
        *INPUT_NORM,
        *GATED_ATTENTION,
        *DELTA_NET,
        *DENSE_MLP,
        *EXPERTS,
        *GATED_SHARED_EXPERT,
        *MTP_BESIDE,
        *OUTPUT,
    ),
    vllm=(*VLLM_GATED_ATTENTION, *VLLM_GROUPED_DELTA_NET, *VLLM_MLP, *_VLLM_GATED_EXPERTS),
    joined=(*JOINED_GROUPS, JOINED_CONVOLUTION),
    layers=LayerRules(partial_rotary=True, prediction=PredictionRules(default=1, beside=True)),
    megatron={"moe_shared_expert_gate": True},
    keys={"shared_ffn": ("shared_expert_intermediate_size",)},
)
