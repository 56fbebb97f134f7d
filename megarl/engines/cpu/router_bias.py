"""Router bias of engines on CPU: vLLM 0.32 ignores it if experts are not chosen by groups.

``CPURouter._compute_routing`` uses ``e_score_correction_bias`` only with ``use_grouped_topk``. A single group of all
experts is equivalent to no groups.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Make routers on CPU choose experts by their bias; a second call changes nothing."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    routing: Any = cpu_router.CPURouter._compute_routing
    if getattr(routing, "biased", False):
        return

    def _compute_routing(
        router: Any, hidden: torch.Tensor, logits: torch.Tensor, indices_type: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bias, scores = router.e_score_correction_bias, router.scoring_func
        custom = router.custom_routing_function is not None
        if bias is None or router.use_grouped_topk or custom or scores not in ("softmax", "sigmoid"):
            found: tuple[torch.Tensor, torch.Tensor] = routing(router, hidden, logits, indices_type, **more)
            return found
        return cpu_router._grouped_topk(
            logits, router.top_k, router.renormalize, 1, 1, scores, router.routed_scaling_factor, bias
        )

    _compute_routing.biased = True  # type: ignore[attr-defined]
    cpu_router.CPURouter._compute_routing = _compute_routing
