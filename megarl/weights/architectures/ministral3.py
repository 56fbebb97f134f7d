"""Ministral 3, text: Mistral's layers with YaRN, and queries scaled up with their position.

Source: ``transformers/models/ministral3/modeling_ministral3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.mistral import MISTRAL
from megarl.weights.architectures.table import LayerRules

MINISTRAL3 = replace(MISTRAL, name="ministral3", models="Ministral 3, text", layers=LayerRules(queries_grow=True))
