"""Parts of layers that the backward pass recomputes, and a check that a model has them."""

from __future__ import annotations

from typing import Any

from megarl.config.schema import ModelConfig
from megarl.weights.architectures import ModelSizes


def lacking(sizes: ModelSizes) -> dict[str, str]:
    """Return module that a model lacks -> reason, worded for the user."""
    found = {
        "mlp": ("has experts in every layer; take moe", len(sizes.moe_layers) == sizes.num_layers),
        "moe": ("has no experts", not sizes.moe_layers),
        "moe_act": ("has no experts", not sizes.moe_layers),
        "shared_experts": ("has no shared experts", not sizes.shared_ffn),
        "mla_up_proj": ("has no latent attention", not sizes.kv_lora),
    }
    return {module: reason for module, (reason, holds) in found.items() if holds}


def recompute_settings(model: ModelConfig, sizes: ModelSizes) -> dict[str, Any]:
    """Return Megatron's settings for ``model.recompute``. Models of other roles may lack modules that the actor has."""
    match model.recompute:
        case "selective":
            modules = [module for module in model.recompute_modules if module not in lacking(sizes)]
            return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case _:
            return {}
