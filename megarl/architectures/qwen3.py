"""Qwen3, dense: grouped queries without biases, RMSNorm on each query and key head, SwiGLU, tied or untied output.

Source: ``transformers/models/qwen3/modeling_qwen3.py``.
"""

from __future__ import annotations

from megarl.architectures.table import Architecture, Logical, Op, Param, Shard, Stage

EMBEDDING = Logical("model.embed_tokens.weight", "vocab hidden")
LM_HEAD = Logical("lm_head.weight", "vocab hidden")
INPUT_NORM = Logical("input_layernorm.weight", "hidden")
Q = Logical("self_attn.q_proj.weight", "q hidden")
K = Logical("self_attn.k_proj.weight", "kv hidden")
V = Logical("self_attn.v_proj.weight", "kv hidden")
Q_NORM = Logical("self_attn.q_norm.weight", "head")
K_NORM = Logical("self_attn.k_norm.weight", "head")
O_PROJ = Logical("self_attn.o_proj.weight", "hidden q")
MLP_NORM = Logical("post_attention_layernorm.weight", "hidden")
GATE = Logical("mlp.gate_proj.weight", "ffn hidden")
UP = Logical("mlp.up_proj.weight", "ffn hidden")
DOWN = Logical("mlp.down_proj.weight", "hidden ffn")
NORM = Logical("model.norm.weight", "hidden")

QWEN3 = Architecture(
    name="qwen3",
    qk_layernorm=True,
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    params=(
        Param("embedding.word_embeddings.weight", Op.SAME, (EMBEDDING,), Shard.VOCAB, Stage.FIRST),
        Param(
            "input_layernorm.weight",
            Op.SAME,
            (INPUT_NORM,),
            Shard.REPLICATED,
            te="self_attention.linear_qkv.layer_norm_weight",
        ),
        Param("self_attention.linear_qkv.weight", Op.QKV, (Q, K, V), Shard.COLUMN, vllm="self_attn.qkv_proj.weight"),
        Param("self_attention.q_layernorm.weight", Op.SAME, (Q_NORM,), Shard.REPLICATED),
        Param("self_attention.k_layernorm.weight", Op.SAME, (K_NORM,), Shard.REPLICATED),
        Param("self_attention.linear_proj.weight", Op.SAME, (O_PROJ,), Shard.ROW),
        Param(
            "pre_mlp_layernorm.weight",
            Op.SAME,
            (MLP_NORM,),
            Shard.REPLICATED,
            te="mlp.linear_fc1.layer_norm_weight",
        ),
        Param("mlp.linear_fc1.weight", Op.GATE_UP, (GATE, UP), Shard.COLUMN, vllm="mlp.gate_up_proj.weight"),
        Param("mlp.linear_fc2.weight", Op.SAME, (DOWN,), Shard.ROW),
        Param("decoder.final_layernorm.weight", Op.SAME, (NORM,), Shard.REPLICATED, Stage.LAST),
        Param("output_layer.weight", Op.TIED, (LM_HEAD, EMBEDDING), Shard.VOCAB, Stage.LAST),
    ),
)
