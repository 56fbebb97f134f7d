"""Parts of layers that are computed again in the backward pass, against the models that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.learn.models.recompute import lacking
from megarl.weights.architectures import architecture


def check_recompute(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the actor has the parts of layers that are computed again. Models of other roles leave out what they
    do not have.

    Raises:
        ConfigError: naming the module.
    """
    model, modules = config.model, config.model.recompute_modules
    if model.recompute != "selective":
        return
    if not modules:
        raise ConfigError("model.recompute=selective with model.recompute_modules=[]; set model.recompute to none")
    missing = lacking(architecture(hf_config).sizes(hf_config))
    if absent := [module for module in modules if module in missing]:
        raise ConfigError(
            f"model.recompute_modules={modules}, but the model of model.path={model.path} {missing[absent[0]]}; leave "
            f"{absent[0]} out"
        )
    if "moe_act" in modules and model.transformer_impl != "transformer_engine":
        raise ConfigError(
            f"model.recompute_modules={modules}: Megatron-Core computes moe_act again in TransformerEngine's grouped "
            "GEMM alone; leave moe_act out, take moe, or set model.transformer_impl to transformer_engine"
        )
    if "moe" in modules and (model.router.is_used or config.rollout.routing_replay):
        cause = "model.router" if model.router.is_used else "rollout.routing_replay"
        raise ConfigError(
            f"model.recompute_modules={modules} with {cause}: which sequence a token is of is known to whole layers "
            "alone when they are computed again; leave moe out, or set model.recompute to full"
        )
