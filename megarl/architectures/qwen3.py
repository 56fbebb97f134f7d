"""Qwen3, dense: grouped queries without biases, RMSNorm on each query and key head, SwiGLU, tied or untied output.

Source: ``transformers/models/qwen3/modeling_qwen3.py``.
"""

from __future__ import annotations

from megarl.architectures.table import Architecture, Logical, Op, Param, Shard, Stage

EMBEDDING = Logical("model.embed_tokens.weight", "vocab", "hidden")

QWEN3 = Architecture(
    name="qwen3",
    qk_layernorm=True,
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    params=(
        Param("embedding.word_embeddings.weight", Op.SAME, (EMBEDDING,), EMBEDDING.name, Shard.VOCAB, Stage.FIRST),
        Param(
            "input_layernorm.weight",
            Op.SAME,
            (Logical("input_layernorm.weight", "hidden"),),
            "input_layernorm.weight",
            Shard.REPLICATED,
            te="self_attention.linear_qkv.layer_norm_weight",
        ),
        Param(
            "self_attention.linear_qkv.weight",
            Op.QKV,
            (
                Logical("self_attn.q_proj.weight", "q", "hidden"),
                Logical("self_attn.k_proj.weight", "kv", "hidden"),
                Logical("self_attn.v_proj.weight", "kv", "hidden"),
            ),
            "self_attn.qkv_proj.weight",
            Shard.COLUMN,
        ),
        Param(
            "self_attention.q_layernorm.weight",
            Op.SAME,
            (Logical("self_attn.q_norm.weight", "head"),),
            "self_attn.q_norm.weight",
            Shard.REPLICATED,
        ),
        Param(
            "self_attention.k_layernorm.weight",
            Op.SAME,
            (Logical("self_attn.k_norm.weight", "head"),),
            "self_attn.k_norm.weight",
            Shard.REPLICATED,
        ),
        Param(
            "self_attention.linear_proj.weight",
            Op.SAME,
            (Logical("self_attn.o_proj.weight", "hidden", "q"),),
            "self_attn.o_proj.weight",
            Shard.ROW,
        ),
        Param(
            "pre_mlp_layernorm.weight",
            Op.SAME,
            (Logical("post_attention_layernorm.weight", "hidden"),),
            "post_attention_layernorm.weight",
            Shard.REPLICATED,
            te="mlp.linear_fc1.layer_norm_weight",
        ),
        Param(
            "mlp.linear_fc1.weight",
            Op.GATE_UP,
            (Logical("mlp.gate_proj.weight", "ffn", "hidden"), Logical("mlp.up_proj.weight", "ffn", "hidden")),
            "mlp.gate_up_proj.weight",
            Shard.COLUMN,
        ),
        Param(
            "mlp.linear_fc2.weight",
            Op.SAME,
            (Logical("mlp.down_proj.weight", "hidden", "ffn"),),
            "mlp.down_proj.weight",
            Shard.ROW,
        ),
        Param(
            "decoder.final_layernorm.weight",
            Op.SAME,
            (Logical("model.norm.weight", "hidden"),),
            "model.norm.weight",
            Shard.REPLICATED,
            Stage.LAST,
        ),
        Param(
            "output_layer.weight",
            Op.TIED,
            (Logical("lm_head.weight", "vocab", "hidden"), EMBEDDING),
            "lm_head.weight",
            Shard.VOCAB,
            Stage.LAST,
        ),
    ),
)
