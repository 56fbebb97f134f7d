"""LFM2, dense: short gated convolutions in most layers, attention in the others.

Source: ``transformers/models/lfm2/modeling_lfm2.py``; vLLM 0.32 ``model_executor/models/lfm2.py``, which
ties the output weight.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.blocks import (
    EMBEDDING,
    JOINED_SHORT_IN,
    OUTPUT,
    SHORT_CONVOLUTION,
    UNNORMED_ATTENTION,
    VLLM_ATTENTION,
    VLLM_SHORT_CONVOLUTION,
    gated,
    gated_rows,
    same,
    vllm_gated,
)
from megarl.weights.architectures.table import Architecture, LayerRules, Logical, Shard, Stage

_MLP = gated("feed_forward", "ffn", names=("w1", "w3", "w2"))

LFM2 = Architecture(
    name="lfm2",
    models="LFM2, dense",
    params=(
        *EMBEDDING,
        same("input_layernorm.weight", Logical("operator_norm.weight", "hidden"), Stage.LAYER),
        replace(UNNORMED_ATTENTION[0], stage=Stage.ATTENTION),
        same(
            "self_attention.linear_proj.weight",
            Logical("self_attn.out_proj.weight", "hidden q", Shard.ROW),
            Stage.ATTENTION,
        ),
        *(
            same(f"self_attention.{norm}.weight", Logical(f"self_attn.{norm}.weight", "head"), Stage.ATTENTION)
            for norm in ("q_layernorm", "k_layernorm")
        ),
        *SHORT_CONVOLUTION,
        same("pre_mlp_layernorm.weight", Logical("ffn_norm.weight", "hidden"), Stage.LAYER),
        *gated_rows(_MLP, Stage.LAYER, "mlp"),
        same("decoder.final_layernorm.weight", Logical("model.embedding_norm.weight", "hidden"), Stage.LAST),
        OUTPUT[-1],
    ),
    vllm=(*VLLM_ATTENTION, *VLLM_SHORT_CONVOLUTION, *vllm_gated(_MLP, "feed_forward.w13.weight")),
    joined=(JOINED_SHORT_IN,),
    layers=LayerRules(norm_epsilon="norm_eps"),
    has_score_class=False,
    fixed={"conv_bias": False, "tie_word_embeddings": True},
    keys={"taps": ("conv_L_cache",)},
)
