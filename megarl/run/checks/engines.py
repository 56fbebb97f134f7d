"""Checks of what engines are started with: memory of their KV cache, types of it and of weights, further options of
vLLM."""

from __future__ import annotations

from megarl.core.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job
from megarl.run.checks.engine_options import check_engine_options


def check_engine_settings(config: Config, job: Job) -> None:
    """Raise ConfigError if engines cannot be started with these settings, or samples with them cannot be trained on."""
    if not job.rollouts:
        return
    _check_cache_size(config)
    _check_dtypes(config, job)
    check_engine_options(config)


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
    if rollout.placement == "colocated" and config.cluster.device_bytes is None:
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
            "cache of model.dtype; set both (0.2 is a beginning)"
        )
