"""Checks of what engines are started with: memory and type of their KV cache, further options of vLLM."""

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
    _check_cache_dtype(config, job)
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


def _check_cache_dtype(config: Config, job: Job) -> None:
    dtype = config.rollout.kv_cache_dtype
    if dtype == "auto":
        return
    given = f"rollout.kv_cache_dtype={dtype}"
    if config.parallel.backend == "gloo":
        raise ConfigError(
            f"{given} with parallel.backend=gloo: engines on CPUs are proven to compute what the trainer does, to "
            "rounding; set it to auto"
        )
    if job.mode == "bench":
        return
    if config.algorithm.correction == "none":
        raise ConfigError(
            f"{given} without algorithm.correction: engines sample from another distribution than the trainer's; set "
            "algorithm.correction=truncate, or rollout.kv_cache_dtype=auto"
        )
    if None in (config.sync.probe_tolerance, config.sync.sample_tolerance):
        raise ConfigError(
            f"{given} without sync.probe_tolerance and sync.sample_tolerance, whose defaults hold for a cache of "
            "model.dtype; set both (0.2 is a beginning)"
        )
