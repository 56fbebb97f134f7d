"""OLMo 3: OLMo 2's layers, most with a window; YaRN only in layers without one.

Source: ``transformers/models/olmo3/modeling_olmo3.py``; vLLM 0.32 runs it through transformers.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.architectures.olmo2 import OLMO2
from megarl.weights.architectures.table import LayerRules

OLMO3 = replace(OLMO2, name="olmo3", models="OLMo 3", layers=LayerRules(windows=True, ropes=True))
