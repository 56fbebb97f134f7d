"""Rows shared by many families. A family's file combines them and adds only the rows that differ.

Names of Megatron-Core 0.16.1 (local spec; TransformerEngine's if it fuses a norm into the next linear) and vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.table import BaseNames, Fused, JoinedTensor, Logical, Op, Param, Shard, Stage

COLUMN, ROW, VOCAB = Shard.COLUMN, Shard.ROW, Shard.VOCAB

# ---------------------------------------------------------------- around the layers

_EMBEDDING = Logical("model.embed_tokens.weight", "vocab hidden", VOCAB)
_LM_HEAD = Logical("lm_head.weight", "vocab hidden", VOCAB)

EMBEDDING = (Param("embedding.word_embeddings.weight", Op.SAME, (_EMBEDDING,), Stage.FIRST),)
OUTPUT = (
    Param("decoder.final_layernorm.weight", Op.SAME, (Logical("model.norm.weight", "hidden"),), Stage.LAST),
    Param("output_layer.weight", Op.TIED, (_LM_HEAD, _EMBEDDING), Stage.LAST),
)

INNER_NAMES = BaseNames((("model.visual.", "visual."), ("model.language_model.", "model.")))
"""Names of a language model beside a vision tower."""


def same(megatron: str, part: Logical, stage: Stage) -> Param:
    """Row of one logical tensor that Megatron stores unchanged."""
    return Param(megatron, Op.SAME, (part,), stage)


def linear(name: str, axes: str) -> tuple[Logical, Logical]:
    """Weight and bias of an unsharded linear layer; ``axes`` are the weight's."""
    return Logical(f"{name}.weight", axes), Logical(f"{name}.bias", axes.split()[0])


def layer_norm(name: str, axis: str) -> tuple[Logical, Logical]:
    """Weight and bias of a LayerNorm."""
    return Logical(f"{name}.weight", axis), Logical(f"{name}.bias", axis)


# ---------------------------------------------------------------- attention: grouped queries

_INPUT_NORM = Logical("input_layernorm.weight", "hidden")
_QKV = (
    Logical("self_attn.q_proj.weight", "q hidden", COLUMN),
    Logical("self_attn.k_proj.weight", "kv hidden", COLUMN),
    Logical("self_attn.v_proj.weight", "kv hidden", COLUMN),
)
_QKV_BIAS = (
    Logical("self_attn.q_proj.bias", "q", COLUMN),
    Logical("self_attn.k_proj.bias", "kv", COLUMN),
    Logical("self_attn.v_proj.bias", "kv", COLUMN),
)
_O_PROJ = Logical("self_attn.o_proj.weight", "hidden q", ROW)

UNNORMED_ATTENTION = (
    Param("self_attention.linear_qkv.weight", Op.QKV, _QKV),
    Param("self_attention.linear_proj.weight", Op.SAME, (_O_PROJ,)),
)
"""Attention without a preceding norm."""
ATTENTION = (
    Param("input_layernorm.weight", Op.SAME, (_INPUT_NORM,), te="self_attention.linear_qkv.layer_norm_weight"),
    *UNNORMED_ATTENTION,
)
QK_NORM = (
    Param("self_attention.q_layernorm.weight", Op.SAME, (Logical("self_attn.q_norm.weight", "head"),)),
    Param("self_attention.k_layernorm.weight", Op.SAME, (Logical("self_attn.k_norm.weight", "head"),)),
)
OPTIONAL_QK_NORM = (
    Param("self_attention.q_layernorm.weight", Op.SAME, (Logical("self_attn.q_norm.weight", "normed_head"),)),
    Param("self_attention.k_layernorm.weight", Op.SAME, (Logical("self_attn.k_norm.weight", "normed_head"),)),
)
"""Norms of models with ``use_qk_norm`` in config.json."""
_GATED_QUERIES = Logical("self_attn.q_proj.weight", "gated_q hidden", COLUMN)
_GATED_QKV = (_GATED_QUERIES, *_QKV[1:])
GATED_ATTENTION = (
    Param("self_attention.linear_qkv.weight", Op.GATED_QKV, _GATED_QKV, Stage.ATTENTION),
    Param("self_attention.linear_proj.weight", Op.SAME, (_O_PROJ,), Stage.ATTENTION),
    *(replace(row, stage=Stage.ATTENTION) for row in QK_NORM),
)
"""Attention whose output each head multiplies by a gate, with norms of queries and keys; without a preceding norm."""
VLLM_GATED_ATTENTION = (Fused("self_attn.qkv_proj.weight", Op.GATED_QKV, _GATED_QKV),)
QK_NORM_AFTER_ROPE = tuple(
    Param(f"self_attention.core_attention.{short}_layernorm.weight", Op.SAME, (Logical(f"self_attn.{name}", "head"),))
    for short, name in (("q", "query_layernorm.weight"), ("k", "key_layernorm.weight"))
)
WHOLE_QK_NORM = (
    Param("self_attention.q_layernorm.weight", Op.SAME, (Logical("self_attn.q_norm.weight", "q"),)),
    Param("self_attention.k_layernorm.weight", Op.SAME, (Logical("self_attn.k_norm.weight", "kv"),)),
)
"""Norms over all heads together; each rank has the full weight."""
CUT_QK_NORM = tuple(Fused(norm.name, Op.SAME, (norm,), Shard.COLUMN) for row in WHOLE_QK_NORM for norm in row.hf)
"""The same norms in models where each vLLM worker has only its heads' part."""
QKV_BIAS = (Param("self_attention.linear_qkv.bias", Op.QKV, _QKV_BIAS),)
_OPTIONAL_QKV_BIAS = (
    Logical("self_attn.q_proj.bias", "biased_q", COLUMN),
    Logical("self_attn.k_proj.bias", "biased_kv", COLUMN),
    Logical("self_attn.v_proj.bias", "biased_kv", COLUMN),
)
OPTIONAL_QKV_BIAS = (Param("self_attention.linear_qkv.bias", Op.QKV, _OPTIONAL_QKV_BIAS),)
"""Biases of models with ``attention_bias`` in config.json."""
_OUT_BIAS = Logical("self_attn.o_proj.bias", "hidden")
OUT_BIAS = (same("self_attention.linear_proj.bias", _OUT_BIAS, Stage.LAYER),)
"""Bias of attention's output projection."""
SINKS = (
    Param("self_attention.core_attention.softmax_offset", Op.SAME, (Logical("self_attn.sinks", "heads", COLUMN),)),
)
"""Attention sinks: scores that enter each head's softmax but have no value."""
JOINED_QKV = JoinedTensor("self_attn.qkv_proj.weight", tuple(part.name for part in _QKV))
"""Queries, keys and values stored as one tensor in a checkpoint's files."""
VLLM_ATTENTION = (Fused("self_attn.qkv_proj.weight", Op.QKV, _QKV),)
VLLM_QKV_BIAS = (Fused("self_attn.qkv_proj.bias", Op.QKV, _QKV_BIAS),)
VLLM_OPTIONAL_QKV_BIAS = (Fused("self_attn.qkv_proj.bias", Op.QKV, _OPTIONAL_QKV_BIAS),)

# ---------------------------------------------------------------- attention: multi-head latent (MLA)

_Q_A = Logical("self_attn.q_a_proj.weight", "q_lora hidden")
_KV_A = Logical("self_attn.kv_a_proj_with_mqa.weight", "latent_kv hidden")

LATENT_ATTENTION = (
    Param("input_layernorm.weight", Op.SAME, (_INPUT_NORM,)),
    Param(
        "self_attention.linear_q_proj.weight",  # only without a query latent; the next three rows only with one
        Op.SAME,
        (Logical("self_attn.q_proj.weight", "direct_q hidden", COLUMN),),
    ),
    Param("self_attention.linear_q_down_proj.weight", Op.SAME, (_Q_A,)),
    Param(
        "self_attention.q_layernorm.weight",
        Op.SAME,
        (Logical("self_attn.q_a_layernorm.weight", "q_lora"),),
        te="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    Param(
        "self_attention.linear_q_up_proj.weight",
        Op.SAME,
        (Logical("self_attn.q_b_proj.weight", "latent_q q_lora", COLUMN),),
    ),
    Param("self_attention.linear_kv_down_proj.weight", Op.SAME, (_KV_A,)),
    Param(
        "self_attention.kv_layernorm.weight",
        Op.SAME,
        (Logical("self_attn.kv_a_layernorm.weight", "kv_lora"),),
        te="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Param(
        "self_attention.linear_kv_up_proj.weight",
        Op.SAME,
        (Logical("self_attn.kv_b_proj.weight", "latent_up kv_lora", COLUMN),),
    ),
    Param(
        "self_attention.linear_proj.weight", Op.SAME, (Logical("self_attn.o_proj.weight", "hidden latent_out", ROW),)
    ),
)
VLLM_LATENT_ATTENTION = (Fused("self_attn.fused_qkv_a_proj.weight", Op.CONCAT, (_Q_A, _KV_A)),)

# ---------------------------------------------------------------- linear attention: gated delta net

INPUT_NORM = (Param("input_layernorm.weight", Op.SAME, (_INPUT_NORM,)),)
"""Norm before attention of any kind."""
_DELTA_NAMES = "query", "key", "value", "z", "beta", "alpha"
_DELTA_EXTENTS = "delta_keys", "delta_keys", "delta_values", "delta_values", "delta_heads", "delta_heads"
DELTA_IN = tuple(
    Logical(f"linear_attn.in_proj_{short}.weight", f"{extent} hidden", COLUMN)
    for short, extent in zip(("q", "k", "v", "z", "b", "a"), _DELTA_EXTENTS, strict=True)
)
"""Projections to queries, keys, values, gates, beta and decay."""
DELTA_CONVOLUTION = tuple(
    Logical(f"linear_attn.conv1d_{short}.weight", f"{extent} labels taps", COLUMN)
    for short, extent in zip(("q", "k", "v"), _DELTA_EXTENTS, strict=False)
)
DELTA_NET = (
    Param("self_attention.in_proj.weight", Op.SECTIONS, DELTA_IN, Stage.DELTA, keys=_DELTA_NAMES),
    Param("self_attention.conv1d.weight", Op.SECTIONS, DELTA_CONVOLUTION, Stage.DELTA, keys=_DELTA_NAMES[:3]),
    *(
        Param(f"self_attention.{name}", Op.SAME, (Logical(f"linear_attn.{name}", "delta_heads", COLUMN),), Stage.DELTA)
        for name in ("dt_bias", "A_log")
    ),
    Param("self_attention.out_norm.weight", Op.SAME, (Logical("linear_attn.norm.weight", "delta_value"),), Stage.DELTA),
    Param(
        "self_attention.out_proj.weight",
        Op.SAME,
        (Logical("linear_attn.out_proj.weight", "hidden delta_values", ROW),),
        Stage.DELTA,
    ),
)
JOINED_CONVOLUTION = JoinedTensor("linear_attn.conv1d.weight", tuple(part.name for part in DELTA_CONVOLUTION))
"""The convolution's channels as one tensor in a checkpoint's files."""
JOINED_GROUPS = (
    JoinedTensor("linear_attn.in_proj_qkvz.weight", tuple(part.name for part in DELTA_IN[:4]), grouped=True),
    JoinedTensor("linear_attn.in_proj_ba.weight", tuple(part.name for part in DELTA_IN[4:]), grouped=True),
)
"""The projections as two tensors in a checkpoint's files."""
VLLM_GROUPED_DELTA_NET = (
    Fused("linear_attn.in_proj_qkvz.weight", Op.GROUPED, DELTA_IN[:4]),
    Fused("linear_attn.in_proj_ba.weight", Op.GROUPED, DELTA_IN[4:]),
    Fused("linear_attn.conv1d.weight", Op.SECTIONS, DELTA_CONVOLUTION),
)
VLLM_DELTA_NET = (
    Fused("linear_attn.in_proj_qkvz.weight", Op.SECTIONS, DELTA_IN[:4]),
    Fused("linear_attn.in_proj_ba.weight", Op.SECTIONS, DELTA_IN[4:]),
    Fused("linear_attn.conv1d.weight", Op.SECTIONS, DELTA_CONVOLUTION),
)

JOINED_DELTA_QKV = JoinedTensor("linear_attn.in_proj_qkv.weight", tuple(part.name for part in DELTA_IN[:3]))
"""Projections to queries, keys and values as one tensor in a checkpoint's files."""

# ---------------------------------------------------------------- short gated convolution

_SHORT_IN = tuple(Logical(f"conv.in_proj_{part}.weight", "hidden hidden", COLUMN) for part in ("b", "c", "x"))
_SHORT_TAPS = Logical("conv.conv.weight", "hidden labels taps", COLUMN)
_SHORT_OUT = Logical("conv.out_proj.weight", "hidden hidden", ROW)
SHORT_CONVOLUTION = (
    Param("self_attention.in_proj.weight", Op.SECTIONS, _SHORT_IN, Stage.CONVOLUTION, keys=("b", "c", "x")),
    same("self_attention.conv1d.weight", _SHORT_TAPS, Stage.CONVOLUTION),
    same("self_attention.out_proj.weight", _SHORT_OUT, Stage.CONVOLUTION),
)
VLLM_SHORT_CONVOLUTION = (
    Fused("short_conv.in_proj.weight", Op.SECTIONS, _SHORT_IN),
    Fused("short_conv.conv.weight", Op.SAME, (_SHORT_TAPS,)),
    Fused("short_conv.out_proj.weight", Op.SAME, (_SHORT_OUT,)),
)
JOINED_SHORT_IN = JoinedTensor("conv.in_proj.weight", tuple(part.name for part in _SHORT_IN))
"""The convolution's projections as one tensor in a checkpoint's files."""

# ---------------------------------------------------------------- gated MLPs (SwiGLU)

_MLP_NORM = Logical("post_attention_layernorm.weight", "hidden")
Gated = tuple[Logical, Logical, Logical]
"""Gate, up and down projections."""


def gated(hf: str, extent: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Gated:
    """Tensors of a gated MLP of width ``extent``, under the prefix ``hf``."""
    gate, up, down = names
    return (
        Logical(f"{hf}.{gate}.weight", f"{extent} hidden", COLUMN),
        Logical(f"{hf}.{up}.weight", f"{extent} hidden", COLUMN),
        Logical(f"{hf}.{down}.weight", f"hidden {extent}", ROW),
    )


def gated_rows(mlp: Gated, stage: Stage, megatron: str, te: str | None = None) -> tuple[Param, Param]:
    """Rows of ``mlp`` under the prefix ``megatron``; ``{fc}`` in ``te`` becomes ``linear_fc1`` and ``linear_fc2``."""
    gate, up, down = mlp
    return (
        Param(f"{megatron}.linear_fc1.weight", Op.CONCAT, (gate, up), stage, te and te.replace("{fc}", "linear_fc1")),
        Param(f"{megatron}.linear_fc2.weight", Op.SAME, (down,), stage, te and te.replace("{fc}", "linear_fc2")),
    )


def vllm_gated(mlp: Gated, joint: str, down: str | None = None) -> tuple[Fused, ...]:
    """vLLM's rows: ``joint`` for gate and up, and ``down`` if it differs from the HF name."""
    fused = (Fused(joint, Op.CONCAT, mlp[:2]),)
    return fused if down is None else (*fused, Fused(down, Op.SAME, mlp[2:]))


def mlp_norm(stage: Stage) -> tuple[Param, ...]:
    """Norm before the MLP. TransformerEngine fuses it into a dense MLP's first linear, but not into a router."""
    te = None if stage is Stage.MOE else "mlp.linear_fc1.layer_norm_weight"
    return (Param("pre_mlp_layernorm.weight", Op.SAME, (_MLP_NORM,), stage, te),)


_MLP = gated("mlp", "ffn")
UNNORMED_MLP = gated_rows(_MLP, Stage.LAYER, "mlp")
"""MLP of every layer, without a preceding norm."""
MLP = (*mlp_norm(Stage.LAYER), *UNNORMED_MLP)
"""MLP of every layer, with its norm."""
DENSE_MLP = (*mlp_norm(Stage.DENSE), *gated_rows(_MLP, Stage.DENSE, "mlp"))
"""MLP of the layers without experts."""
JOINED_MLP = JoinedTensor("mlp.gate_up_proj.weight", tuple(part.name for part in _MLP[:2]))
"""Gate and up stored as one tensor in a checkpoint's files."""
VLLM_MLP = vllm_gated(_MLP, "mlp.gate_up_proj.weight")
MLP_NORM_OF_GEMMA = (
    Param("pre_mlp_layernorm.weight", Op.SAME, (Logical("pre_feedforward_layernorm.weight", "hidden"),)),
)
"""Norm before the MLP in families with ``post_attention_layernorm`` after attention."""


def norms_after(attention: str, mlp: str) -> tuple[Param, Param]:
    """Norms of the outputs of attention and MLP; arguments are HF names within the layer."""
    return (
        Param("self_attn_bda.norm.weight", Op.SAME, (Logical(attention, "hidden"),)),
        Param("mlp_bda.norm.weight", Op.SAME, (Logical(mlp, "hidden"),)),
    )


NORMS_AFTER = norms_after("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
SANDWICH_NORMS = norms_after("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
"""Norms of the outputs in families with ``post_attention_layernorm`` before the MLP."""

# ---------------------------------------------------------------- experts


def expert_rows(experts: Gated, router: Logical) -> tuple[Param, ...]:
    """Rows of an MoE layer: norm, router and experts."""
    return (
        *mlp_norm(Stage.MOE),
        Param("mlp.router.weight", Op.SAME, (router,), Stage.MOE),
        *gated_rows(experts, Stage.MOE, "mlp.experts.local_experts.{expert}", "mlp.experts.{fc}.weight{expert}"),
    )


def vllm_experts(experts: Gated, module: str) -> tuple[Fused, ...]:
    """vLLM's stacked expert weights in ``module``."""
    stacks = f"{module}.experts.routed_experts"
    return vllm_gated(experts, f"{stacks}.w13_weight", f"{stacks}.w2_weight")


_EXPERTS = gated("mlp.experts.{expert}", "expert_ffn")
_ROUTER = Logical("mlp.gate.weight", "experts hidden")
EXPERTS = expert_rows(_EXPERTS, _ROUTER)
VLLM_EXPERTS = vllm_experts(_EXPERTS, "mlp")
JOINED_EXPERTS = (
    JoinedTensor("mlp.experts.gate_up_proj", tuple(part.name for part in _EXPERTS[:2])),
    JoinedTensor("mlp.experts.down_proj", (_EXPERTS[2].name,)),
)
"""Experts in stacks; files with one tensor for each expert are read, too."""

_ROUTER_BIAS = Logical("mlp.gate.e_score_correction_bias", "experts", dtype="float32")


def router_bias(bias: Logical = _ROUTER_BIAS) -> tuple[Param]:
    """Row of a router's bias; float32 unless ``bias`` differs."""
    return (Param("mlp.router.expert_bias", Op.SAME, (bias,), Stage.MOE),)


ROUTER_BIAS = router_bias()
"""Bias that affects the choice of experts but not their weights."""
_SHARED = gated("mlp.shared_experts", "shared_ffn")
SHARED_EXPERTS = gated_rows(_SHARED, Stage.MOE, "mlp.shared_experts")
VLLM_SHARED_EXPERTS = vllm_gated(_SHARED, "mlp.shared_experts.gate_up_proj.weight")
_GATED_SHARED = gated("mlp.shared_expert", "shared_ffn")
_SHARED_GATE = Logical("mlp.shared_expert_gate.weight", "labels hidden")
GATED_SHARED_EXPERT = (
    *gated_rows(_GATED_SHARED, Stage.MOE, "mlp.shared_experts"),
    same("mlp.shared_experts.gate_weight", _SHARED_GATE, Stage.MOE),
)
"""A shared expert whose output a gate multiplies; Megatron needs ``moe_shared_expert_gate``."""
VLLM_GATED_SHARED_EXPERT = vllm_gated(_GATED_SHARED, "mlp.shared_expert.gate_up_proj.weight")
_IN_RUNNER = "mlp.experts._shared_experts._layer.shared_experts"


def vllm_shared_experts_of_transformers(bias: Logical = _ROUTER_BIAS) -> tuple[Fused, ...]:
    """Shared experts and router of a model that vLLM runs with transformers' modules."""
    return (
        *vllm_gated(_SHARED, f"{_IN_RUNNER}.gate_up_proj.weight", f"{_IN_RUNNER}.down_proj.weight"),
        Fused("mlp.experts.gate.weight", Op.SAME, (_ROUTER,)),
        Fused("mlp.experts.gate.e_score_correction_bias", Op.SAME, (bias,)),
    )


# ---------------------------------------------------------------- experts with biases; rows of gate and up alternate

_EXPERT, _LOCAL, _STACKS = "mlp.experts.{expert}", "mlp.experts.local_experts.{expert}", "mlp.experts.routed_experts"
_GATE_UP = Logical(f"{_EXPERT}.gate_up_proj.weight", "gate_up hidden", COLUMN)
_GATE_UP_BIAS = Logical(f"{_EXPERT}.gate_up_proj.bias", "gate_up", COLUMN)
_DOWN = Logical(f"{_EXPERT}.down_proj.weight", "hidden expert_ffn", ROW)
_DOWN_BIAS = Logical(f"{_EXPERT}.down_proj.bias", "hidden", Shard.FIRST)
_BIASED_ROUTER = linear("mlp.router", "experts hidden")
BIASED_ROUTER = (
    same("mlp.router.weight", _BIASED_ROUTER[0], Stage.MOE),
    same("mlp.router.bias", _BIASED_ROUTER[1], Stage.MOE),
)
"""Router with a bias that is part of its logits."""
PAIRED_EXPERTS = (
    same(f"{_LOCAL}.linear_fc1.weight", _GATE_UP, Stage.MOE),
    same(f"{_LOCAL}.linear_fc1.bias", _GATE_UP_BIAS, Stage.MOE),
    same(f"{_LOCAL}.linear_fc2.weight", _DOWN, Stage.MOE),
    same(f"{_LOCAL}.linear_fc2.bias", _DOWN_BIAS, Stage.MOE),
)
VLLM_PAIRED_EXPERTS = (
    Fused(f"{_STACKS}.w13_weight", Op.SAME, (_GATE_UP,)),
    Fused(f"{_STACKS}.w13_bias", Op.SAME, (_GATE_UP_BIAS,)),
    Fused(f"{_STACKS}.w2_weight", Op.SAME, (_DOWN,)),
    Fused(f"{_STACKS}.w2_bias", Op.SAME, (_DOWN_BIAS,)),
)
JOINED_PAIRED_EXPERTS = (
    JoinedTensor("mlp.experts.gate_up_proj", (_GATE_UP.name,), transposed=True),
    JoinedTensor("mlp.experts.gate_up_proj_bias", (_GATE_UP_BIAS.name,)),
    JoinedTensor("mlp.experts.down_proj", (_DOWN.name,), transposed=True),
    JoinedTensor("mlp.experts.down_proj_bias", (_DOWN_BIAS.name,)),
)

# ---------------------------------------------------------------- multi-token prediction


def prediction_rows(embedding: str, hidden: str, joint: str, last: str) -> tuple[Param, ...]:
    """Rows of a prediction layer besides its transformer layer.

    Arguments are HF names: norms of the next token's embedding and of the hidden state, the projection of both
    (embedding first), and the norm before the output weight.
    """
    return (
        same("enorm.weight", Logical(embedding, "hidden"), Stage.MTP),
        same("hnorm.weight", Logical(hidden, "hidden"), Stage.MTP),
        same("eh_proj.weight", Logical(joint, "hidden two_hidden", COLUMN), Stage.MTP),
        same("final_layernorm.weight", Logical(last, "hidden"), Stage.MTP),
    )


MTP = prediction_rows("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
MTP_BESIDE = prediction_rows("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")
"""Rows of a layer under ``mtp.`` in the files."""
