"""Checks of adapters (``model.lora``) against other settings, the model and the PEFT folder of their start."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.core.errors import CheckpointError, ConfigError, first_of
from megarl.engines.client.names import LORA_RANKS
from megarl.weights.architectures import Head, architecture
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.slices import Source
from megarl.weights.reshard.adapters import (
    EMBEDDING,
    TOWER,
    Factors,
    factors_of,
    file_shapes,
    matches_key,
    names_module,
    saved_whole,
)
from megarl.weights.reshard.layouts import hf_layout

SETTINGS = ("rank", "alpha", "rslora", "targets", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Settings of ``model.lora`` that an adapter's files also have."""


def check_adapter(config: Config, hf_config: Mapping[str, Any], files: Source, head: Head = "lm") -> None:
    """Check that the model has the modules of ``model.lora``, and that ``model.lora.path`` is an adapter with these
    settings.

    Args:
        files: Tensors of ``model.path``.

    Raises:
        ConfigError, CheckpointError: names the setting, its value, the adapter's value and the fix.
    """
    lora = config.model.lora
    if not lora.is_used and lora.path is None:
        return
    tensors = hf_layout(hf_config, head=head).tensors
    if lora.path is None:
        factors_of(hf_config, lora, head)
        saved_whole(tensors, lora)
        return
    if config.trainer.warm_start.steps:
        raise ConfigError(
            f"model.lora.path={lora.path} with trainer.warm_start.steps={config.trainer.warm_start.steps}: the warm "
            "start changes the model that the adapter is for; set trainer.warm_start.steps=0"
        )
    folder = Path(lora.path)
    try:
        found = peft.lora_of(folder, hf_config, head)
        if (fault := next(_faults(lora, found, hf_config, head, tensors), None)) is not None:
            raise ConfigError(f"{fault}; set {_settings(lora, found)}")
        shapes = file_shapes(factors_of(hf_config, found, head).values())
        saved = [*saved_whole(tensors, found), *(["score.weight"] if head == "score" else [])]
        wanted = shapes | {name: tensors[name] for name in saved}
        peft.open_adapter(folder, wanted, files, hf_config).close()
    except CheckpointError as error:
        raise CheckpointError(f"model.lora.path: {error}") from error


def _faults(
    lora: LoraConfig, found: LoraConfig, hf_config: Mapping[str, Any], head: Head, tensors: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the differences between the settings and the adapter."""
    if not lora.is_used:
        yield f"model.lora.rank=0 trains no adapters, the one in model.lora.path={lora.path} has rank {found.rank}"
        return
    here, there = (factors_of(hf_config, each, head) for each in (lora, found))
    where = f"the adapter in model.lora.path={lora.path}"
    if more := [name for name in here if name not in there]:
        yield f"model.lora.targets={lora.targets} has {first_of(more, 2)}, {where} does not"
    if less := [name for name in there if name not in here]:
        yield f"model.lora.targets={lora.targets} lacks {first_of(less, 2)} of {where}"
    for name, own in here.items():
        other: Factors = there[name]
        if own.rank != other.rank:
            yield f"model.lora.rank={lora.rank} gives {name} rank {own.rank}, {where} has rank {other.rank}"
        if own.scale != other.scale:
            yield (
                f"model.lora.alpha={lora.alpha:g} multiplies the adapter of {name} by {own.scale:g}, {where} by "
                f"{other.scale:g}"
            )
    if set(saved_whole(tensors, lora)) != set(saved_whole(tensors, found)):
        yield f"model.lora.modules_to_save={lora.modules_to_save}, {where} has {found.modules_to_save}"


def _settings(lora: LoraConfig, found: LoraConfig) -> str:
    """Return the adapter's values of differing settings, in command-line form."""
    values = [(key, getattr(found, key)) for key in SETTINGS if getattr(found, key) != getattr(lora, key)]
    return ", ".join(f"model.lora.{key}={value}" for key, value in values)


EXPERTS = (".experts.", ".shared_expert")
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")
VISION = re.compile(r"\bvis(ual|ion)")
_SHOWN = 3


def check_separate(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``sync.adapter=separate`` is set and engines cannot apply these adapters separately:
    adapters of experts, latent attention, embedding, head and vision tower must be merged."""
    lora, sync = config.model.lora, config.sync
    if sync.adapter == "merged":
        return
    if not lora.is_used:
        raise ConfigError("sync.adapter=separate, but model.lora.rank=0: there is no adapter; set one of them")
    factors = factors_of(hf_config, lora)
    sizes = architecture(hf_config).sizes(hf_config)
    fix = "set sync.adapter=merged"
    unproven = {
        "adapters of experts": [m.module for m in factors.values() if any(part in m.module for part in EXPERTS)],
        "adapters of latent attention": [
            m.module for m in factors.values() if sizes.kv_lora and (m.leaf in LATENT or "self_attn" in m.module)
        ],
        "an adapter of the embedding": [m.module for m in factors.values() if m.is_embedding],
        "an adapter of the head": [m.module for m in factors.values() if m.module.endswith("lm_head")],
        "adapters of the vision tower": [m.module for m in factors.values() if VISION.search(m.module)],
        "modules that are trained whole": list(lora.modules_to_save),
    }
    for what, names in unproven.items():
        if names:
            raise ConfigError(
                f"sync.adapter=separate with {what} ({first_of(names, _SHOWN)}), which vLLM was not proven to compute "
                f"with apart from the model; {fix}, or take them out of model.lora"
            )
    refused = {
        f"rollout.weight_dtype={config.rollout.weight_dtype}": config.rollout.weight_dtype != "auto",
        "sync.method=checkpoint, whose files have merged weights": sync.method == "checkpoint",
        "sync.cold_interval, whose engine begins with merged weights": sync.cold_interval is not None,
    }
    for what, holds in refused.items():
        if holds:
            raise ConfigError(f"sync.adapter=separate with {what}; {fix}")
    on_cpu = config.parallel.backend == "gloo"
    if on_cpu and config.rollout.pp > 1:
        raise ConfigError(
            f"sync.adapter=separate with rollout.pp={config.rollout.pp}: with LoRA layers vLLM's later stages make no "
            f"input buffers on CPUs; {fix}, or rollout.pp=1"
        )
    if on_cpu and sizes.moe_layers:
        raise ConfigError(
            f"sync.adapter=separate with a model that has experts: with LoRA layers vLLM computes experts by Triton, "
            f"which CPUs do not have; {fix}"
        )
    largest = max((own.rank for own in factors.values()), default=0)
    if largest > LORA_RANKS[-1]:
        raise ConfigError(
            f"sync.adapter=separate with an adapter of rank {largest}: vLLM has room for {LORA_RANKS[-1]}; {fix}, or "
            "lower model.lora.rank"
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
