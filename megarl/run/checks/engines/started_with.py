"""Checks of settings of an engine's start: memory and dtype of the KV cache, dtype of weights, vLLM options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job, ProcessKind
from megarl.engines.client.names import EIGHT_BIT_BLOCK
from megarl.run.checks.engines.options import check_engine_options
from megarl.run.nodes import gpu_state
from megarl.weights.architectures import architecture

EIGHT_BIT_CAPABILITY = 8.9
"""Minimum compute capability of 8-bit products in vLLM, for linear layers with a scale per channel and Triton's kernel
of experts."""


def check_engine_settings(config: Config, job: Job) -> None:
    """Raise ConfigError if engines cannot start with these settings, or their samples cannot be trained on."""
    if not job.rollouts:
        return
    _check_cache_size(config)
    _check_dtypes(config, job)
    check_engine_options(config)


def check_eight_bits(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM would pad experts to whole 8-bit blocks, or has no kernel for 8-bit experts here."""
    rollout, sizes = config.rollout, architecture(hf_config).sizes(hf_config)
    if rollout.weight_dtype == "auto" or not sizes.moe_layers:
        return
    width = sizes.expert_ffn if rollout.expert_parallel else sizes.expert_ffn / rollout.tp
    for what, size in ((f"hidden size {sizes.hidden}", sizes.hidden), (f"experts' width {width:g} a worker", width)):
        if size % EIGHT_BIT_BLOCK:
            raise ConfigError(
                f"rollout.weight_dtype=fp8 with a model whose {what} is no multiple of {EIGHT_BIT_BLOCK}, the block of "
                "experts that shares a scale; set it to auto, lower rollout.tp, or set rollout.expert_parallel=true"
            )
    if config.parallel.backend == "gloo" and rollout.expert_parallel:
        raise ConfigError(
            "rollout.weight_dtype=fp8 with rollout.expert_parallel=true: vLLM's kernel of experts in 8 bits for CPUs "
            "takes all experts of a layer; set one of them back"
        )
    if config.parallel.backend == "gloo" and not torch.cpu._is_amx_tile_supported():
        raise ConfigError(
            "rollout.weight_dtype=fp8 with a model that has experts: on CPUs vLLM's kernel for these needs AMX, which "
            "this machine has not; set it to auto"
        )


def check_capability(config: Config, job: Job) -> None:
    """Raise ConfigError if no GPU of this machine supports vLLM's 8-bit layers. Passes if nvidia-smi lists no GPU:
    other nodes must have this node's GPUs."""
    if config.rollout.weight_dtype == "auto" or not job.has(ProcessKind.ENGINE):
        return
    newest = gpu_state.newest_capability(gpu_state.gpus())
    if newest is not None and newest < EIGHT_BIT_CAPABILITY:
        raise ConfigError(
            f"rollout.weight_dtype=fp8 on GPUs of compute capability {newest}: vLLM multiplies in 8 bits from "
            f"{EIGHT_BIT_CAPABILITY} on (Ada, Hopper, Blackwell); set it to auto, or take newer GPUs"
        )


def _check_cache_size(config: Config) -> None:
    rollout, share = config.rollout, config.rollout.gpu_memory_utilization
    if share is None:
        return
    given = f"rollout.gpu_memory_utilization={share:g}"
    if config.parallel.backend == "gloo":
        raise ConfigError(
            f"{given} with parallel.backend=gloo, whose engines are on CPUs; set it to null, and rollout.kv_cache_bytes"
        )
    if rollout.kv_cache_bytes is not None:
        raise ConfigError(
            f"{given} with rollout.kv_cache_bytes={rollout.kv_cache_bytes}: one of them decides the KV cache; set the "
            "other to null"
        )
    if rollout.is_colocated and config.cluster.device_bytes is None:
        raise ConfigError(
            f"{given} with rollout.placement=colocated: whether engines fit beside the trainer's models is computed "
            "from the memory of a GPU; set cluster.device_bytes to it, or rollout.kv_cache_bytes in place of the share"
        )


def _check_dtypes(config: Config, job: Job) -> None:
    rollout, given = config.rollout, list[str]()
    if rollout.kv_cache_dtype != "auto":
        given.append(f"rollout.kv_cache_dtype={rollout.kv_cache_dtype}")
        if config.parallel.backend == "gloo":
            raise ConfigError(
                f"{given[0]} with parallel.backend=gloo: engines on CPUs are proven with a cache of model.dtype alone; "
                "set it to auto"
            )
    if rollout.weight_dtype != "auto":
        given.append(f"rollout.weight_dtype={rollout.weight_dtype}")
        if config.model.dtype != "bfloat16":
            raise ConfigError(
                f"{given[-1]} with model.dtype={config.model.dtype}: vLLM makes 8 bits of bfloat16 alone; set "
                "model.dtype=bfloat16, or rollout.weight_dtype=auto"
            )
    if not given or job.mode == "bench":
        return
    setting = given[0].partition("=")[0]
    if config.algorithm.correction == "none":
        raise ConfigError(
            f"{given[0]} without algorithm.correction: engines sample from another distribution than the trainer's; "
            f"set algorithm.correction=truncate, or {setting}=auto"
        )
    if None in (config.sync.probe_tolerance, config.sync.sample_tolerance):
        raise ConfigError(
            f"{given[0]} without sync.probe_tolerance and sync.sample_tolerance, whose defaults hold for weights and a "
            "cache of model.dtype; set both (0.06 and 0.1 are a beginning)"
        )
