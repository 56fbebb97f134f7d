"""Parts of layers that are computed again in the backward pass, against the models that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.core.config import Config
from megarl.core.config.schema import ModelConfig
from megarl.core.errors import ConfigError
from megarl.weights.architectures import architecture


def check_recompute(config: Config, hf_config: Mapping[str, Any], setting: str = "model.path") -> None:
    """Check that a model has the parts of layers that are computed again.

    Args:
        hf_config: Of the model at ``setting``.

    Raises:
        ConfigError: naming the module.
    """
    model, modules = config.model, config.model.recompute_modules
    if model.recompute != "selective":
        if modules != ModelConfig().recompute_modules:
            raise ConfigError(
                f"model.recompute_modules={modules} has no effect with model.recompute={model.recompute}; set "
                "model.recompute to selective, or leave the modules out"
            )
        return
    if not modules:
        raise ConfigError("model.recompute=selective with model.recompute_modules=[]; set model.recompute to none")
    sizes = architecture(hf_config).sizes(hf_config)
    of_layer = model.router.is_used or config.rollout.routing_replay
    refused = {
        "mlp": ("has experts in every layer; take moe", len(sizes.moe_layers) == sizes.num_layers),
        "moe": ("has no experts", not sizes.moe_layers),
        "moe_act": ("has no experts", not sizes.moe_layers),
        "shared_experts": ("has no shared experts", not sizes.shared_ffn),
        "mla_up_proj": ("has no latent attention", not sizes.kv_lora),
    }
    for module, (reason, holds) in refused.items():
        if module in modules and holds:
            path = getattr(config, setting.split(".")[0]).path
            raise ConfigError(
                f"model.recompute_modules={modules}, but the model of {setting}={path} {reason}; leave {module} out"
            )
    if "moe_act" in modules and model.transformer_impl != "transformer_engine":
        raise ConfigError(
            f"model.recompute_modules={modules}: Megatron-Core computes moe_act again in TransformerEngine's grouped "
            "GEMM alone; leave moe_act out, take moe, or set model.transformer_impl to transformer_engine"
        )
    if "moe" in modules and of_layer:
        cause = "model.router" if model.router.is_used else "rollout.routing_replay"
        raise ConfigError(
            f"model.recompute_modules={modules} with {cause}: which sequence a token is of is known to whole layers "
            "alone when they are computed again; leave moe out, or set model.recompute to full"
        )
