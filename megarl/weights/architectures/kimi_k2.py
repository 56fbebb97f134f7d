"""Kimi K2: DeepSeek-V3 under another ``model_type``, unknown to transformers."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2", models="Kimi K2", config_class="deepseek_v3", has_score_class=False)
