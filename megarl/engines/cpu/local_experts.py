"""Expert parallelism on CPU: vLLM 0.32.0's CPU kernels treat global expert numbers as local and read out of bounds.

An out-of-tree op, by which a plugin replaces an op of vLLM. Imported in a worker before its model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


@UnquantizedFusedMoEMethod.register_oot
class LocalExperts(UnquantizedFusedMoEMethod):
    """Computes this rank's experts; other ranks add the contributions of theirs."""

    def forward_native(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if layer.expert_map is not None:
            local = layer.expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0)
        return super().forward_native(layer, x, topk_weights, topk_ids, *args, **kwargs)
