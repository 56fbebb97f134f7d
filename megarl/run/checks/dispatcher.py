"""Checks of routers and expert-parallel token dispatch against models and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import ConfigError
from megarl.weights.architectures import architecture

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Group sizes in DeepEP's ``Buffer.get_dispatch_config``; another size fails at the first forward pass."""


def check_experts_settings(model: ModelConfig, parallel: ParallelConfig, hf_config: Mapping[str, Any]) -> None:
    """Check ``model.router_dtype`` and ``model.moe_dispatcher`` against the actor. Raises ConfigError."""
    if not architecture(hf_config).sizes(hf_config).moe_layers:
        for name, value, default in (
            ("router_dtype", model.router_dtype, "null"),
            ("moe_dispatcher", model.moe_dispatcher, "alltoall"),
        ):
            if value not in (None, default):
                raise ConfigError(
                    f"model.{name}={value}, but the model in {model.path} has no experts; set it to {default}"
                )
    check_dispatcher(model, parallel, hf_config)


def check_dispatcher(
    model: ModelConfig, parallel: ParallelConfig, hf_config: Mapping[str, Any], role: str | None = None
) -> None:
    """Check that DeepEP can dispatch the tokens of a model with experts on its grid.

    Args:
        model: Settings with the role's ``dtype``.
        role: Section of the grid's settings; None for the actor's.

    Raises:
        ConfigError: names setting, value and fix.
    """
    arch = architecture(hf_config)
    if model.moe_dispatcher != "deepep" or not arch.sizes(hf_config).moe_layers:
        return
    grid, dtype = ("parallel", "model.dtype") if role is None else (f"{role}.parallel", f"{role}.dtype")
    group = parallel.expert_tp * parallel.ep
    refused = {
        f"{grid}.ep=1 leaves every rank all experts, and nothing to exchange; set {grid}.ep above 1": parallel.ep == 1,
        f"DeepEP has no settings for {grid}.ep x etp={group} ranks; let these be one of "
        f"{', '.join(map(str, DEEPEP_RANKS))}": group not in DEEPEP_RANKS,
        f"DeepEP adds up bfloat16 alone, and {dtype}={model.dtype}; set it to bfloat16": model.dtype != "bfloat16",
        "DeepEP sends float32 probabilities of experts, and routers compute in bfloat16; set model.router_dtype to "
        "float32": model.router_dtype is None and not arch.router.sigmoid,
    }
    for reason in (reason for reason, holds in refused.items() if holds):
        raise ConfigError(f"model.moe_dispatcher=deepep: {reason}, or set model.moe_dispatcher to alltoall")
