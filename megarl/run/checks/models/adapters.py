"""Checks of a job's adapters: their targets, the PEFT folder that training starts from, and support by engines that
apply them separately (``sync.adapter=separate``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.lora import LoraConfig
from megarl.core.errors import CheckpointError, ConfigError, first_of
from megarl.engines.client.names import LORA_RANKS
from megarl.weights.architectures import Head, architecture
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.slices import Source
from megarl.weights.reshard.adapters import Factors, factors_of, file_shapes, saved_whole
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
