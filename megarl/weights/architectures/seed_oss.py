"""Seed-OSS: Qwen2's tensors, under other settings.

Source: ``transformers/models/seed_oss/modeling_seed_oss.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.qwen2 import QWEN2

SEED_OSS = replace(
    QWEN2,
    name="seed_oss",
    models="Seed-OSS",
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
)
