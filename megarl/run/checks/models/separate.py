"""Check of what engines can compute with adapters of their own (``sync.adapter=separate``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.core.errors import ConfigError, first_of
from megarl.engines.client.names import LORA_RANKS
from megarl.weights.architectures import architecture
from megarl.weights.reshard.adapters import factors_of

EXPERTS = (".experts.", ".shared_expert")
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")
VISION = re.compile(r"\bvis(ual|ion)")
_SHOWN = 3


def check_separate(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``sync.adapter=separate`` is set and engines cannot compute with these adapters apart from
    the model: experts, latent attention, embedding, head and vision tower are merged."""
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
