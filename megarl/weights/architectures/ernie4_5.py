"""ERNIE 4.5, dense: Llama's layers with a rotary embedding of neighbouring pairs.

Source: ``transformers/models/ernie4_5/modeling_ernie4_5.py``. ``docs/adding_a_model.md`` shows how it was made.
"""

from __future__ import annotations

from megarl.weights.architectures.blocks import ATTENTION, EMBEDDING, MLP, OUTPUT, VLLM_ATTENTION, VLLM_MLP
from megarl.weights.architectures.table import Architecture

ERNIE4_5 = Architecture(
    name="ernie4_5",
    models="ERNIE 4.5, dense",
    params=(*EMBEDDING, *ATTENTION, *MLP, *OUTPUT),
    vllm=(*VLLM_ATTENTION, *VLLM_MLP),
    fixed={"hidden_act": "silu", "use_bias": False},
    megatron={"rotary_interleaved": True},
    has_score_class=False,
)
