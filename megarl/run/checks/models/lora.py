"""Checks of adapters (``model.lora``) against a job's other settings and its models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.core.errors import ConfigError
from megarl.weights.architectures import Head, architecture
from megarl.weights.reshard.adapters import (
    EMBEDDING,
    TOWER,
    Factors,
    factors_of,
    matches_key,
    names_module,
    saved_whole,
)

log = logging.getLogger(__name__)

LM_HEAD = "lm_head"


def check_lora_settings(config: Config) -> None:
    """Refuse settings that contradict adapters or have no effect with them. Needs no model.

    Raises:
        ConfigError: names setting, value and fix.
    """
    model, reference = config.model, config.reference
    lora = model.lora
    if not lora.is_used:
        if config.rollout.is_colocated and config.rollout.offload == "memory":
            raise ConfigError(
                "rollout.offload=memory with model.lora.rank=0: the next publication brings all weights, so those that "
                "an engine keeps are never used; set it to sleep"
            )
        if lora != LoraConfig():
            log.warning("model.lora.*: model.lora.rank=0 trains the model itself; these settings do nothing")
        return
    base = "the reference of a job with adapters is the model without them"
    refused: list[tuple[bool, str, str]] = [
        (
            model.transformer_impl != "local",
            f"model.transformer_impl={model.transformer_impl}",
            "TransformerEngine fuses norms into its linear layers, whose inputs adapters need; set it to local",
        ),
        (
            model.router.bias_update_rate > 0,
            f"model.router.bias_update_rate={model.router.bias_update_rate:g}",
            "router biases belong to the base model, which does not change; set it to 0",
        ),
        (
            model.train_vision_tower,
            "model.train_vision_tower=true",
            "the tower itself does not change either; set it to false, and name its layers in model.lora.targets to "
            "give them adapters",
        ),
        (
            reference.refresh != "never",
            f"reference.refresh={reference.refresh}",
            f"{base}, which does not change; set it to never",
        ),
        (reference.parallel is not None, "reference.parallel", f"{base}, on the actor's grid; leave it out"),
        (
            reference.dtype not in (None, model.dtype),
            f"reference.dtype={reference.dtype}",
            f"{base}, in model.dtype={model.dtype}; leave it out",
        ),
        (
            reference.offload != "none",
            f"reference.offload={reference.offload}",
            f"{base}, which has no separate memory; set it to none (trainer.offload moves the actor)",
        ),
        (
            config.evaluation.average is not None,
            f"evaluation.average={config.evaluation.average}",
            "the average needs a second whole model, which a job with adapters does not have; leave it out",
        ),
    ]
    for is_refused, setting, why in refused:
        if is_refused:
            raise ConfigError(f"{setting} with model.lora.rank={lora.rank}: {why}")
    if not lora.targets:
        raise ConfigError(
            f"model.lora.targets=[] with model.lora.rank={lora.rank} leaves no layer with an adapter; name some, or "
            f"{ALL_LINEAR}"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        for ending, value in getattr(lora, key).items():
            if value <= 0:
                raise ConfigError(f"model.lora.{key}.{ending}={value} must be above 0; leave the layer out of targets")


def check_adapters(lora: LoraConfig, hf_config: Mapping[str, Any], path: str, head: Head = "lm") -> None:
    """Check that a model has the layers of ``model.lora``, each with one kind of training.

    Args:
        path: The model's path, for errors.
        head: ``score`` for a critic or reward model.

    Raises:
        ConfigError: names setting, value and fix.
    """
    if not lora.is_used:
        return
    arch = architecture(hf_config, head)
    if arch.sizes(hf_config).tied and head == "lm":
        for key in ("targets", "modules_to_save"):
            if LM_HEAD in getattr(lora, key):
                raise ConfigError(
                    f"model.lora.{key} has {LM_HEAD}, but the model in {path} computes logits with its embedding "
                    f"(tie_word_embeddings): it has no {LM_HEAD} of its own; leave it out"
                )
        if named := [target for target in lora.targets if names_module(target, EMBEDDING)]:
            raise ConfigError(
                f"model.lora.targets has {named[0]}, but the model in {path} computes logits with its embedding "
                "(tie_word_embeddings): an adapter changes inputs alone, and once merged it would change logits too; "
                "leave it out"
            )
    try:
        factors = factors_of(hf_config, lora, head)
        saved = saved_whole(arch.tensors(hf_config), lora)
    except ConfigError as error:
        raise ConfigError(f"the model in {path}: {error}") from error
    modules = [name.rpartition(".")[0] for name in saved]
    both = [module for module in modules if any(names_module(target, module) for target in lora.targets)]
    if both:
        raise ConfigError(
            f"model.lora.targets and model.lora.modules_to_save both name {both[0]} of the model in {path}: a module "
            "that is trained whole has no adapter; leave it out of one of them"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        for ending in getattr(lora, key):
            if not any(matches_key(ending, own.module) for own in factors.values()):
                raise ConfigError(
                    f"model.lora.{key} has {ending!r}, whose layers model.lora.targets={lora.targets} gives no "
                    "adapter; leave it out, or name it in targets too"
                )
    for own in factors.values():
        if own.rank > min(own.shape):
            raise ConfigError(_too_high(own, lora, path))


def check_tower_overlap(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that no grid overlaps the reduction of gradients with a trained vision tower: micro-batches without images
    have no gradients for it.

    Raises:
        ConfigError: names setting, value and fix.
    """
    lora = config.model.lora
    grids = {"parallel": config.parallel, "critic.parallel": config.critic.parallel}
    overlapped = [setting for setting, grid in grids.items() if grid is not None and grid.overlap_grad_reduce]
    if not lora.is_used or not overlapped:
        return
    named = [own.module for own in factors_of(hf_config, lora).values()]
    named += saved_whole(architecture(hf_config).tensors(hf_config), lora)
    tower = [name for name in named if name.startswith(TOWER)]
    if tower:
        raise ConfigError(
            f"{overlapped[0]}.overlap_grad_reduce=true, and model.lora trains {tower[0]}: a micro-batch without images "
            f"gives the tower no gradient, which Megatron-Core's overlap waits for; set {overlapped[0]}."
            "overlap_grad_reduce to false, or leave the tower out"
        )


def _too_high(own: Factors, lora: LoraConfig, path: str) -> str:
    named = next((ending for ending in lora.rank_pattern if matches_key(ending, own.module)), None)
    setting = "model.lora.rank" if named is None else f"model.lora.rank_pattern.{named}"
    fix = f"lower it to {min(own.shape)} or less"
    if named is None:
        fix += f", or give {own.leaf} a lower rank in model.lora.rank_pattern"
    return (
        f"{setting}={own.rank} is more than the smaller side of {own.module} ({own.shape[0]} x {own.shape[1]}) of the "
        f"model in {path}; {fix}"
    )
