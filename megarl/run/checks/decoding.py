"""Checks of how engines decode: drafts (``rollout.speculative``), and a KV cache that workers divide by position."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job
from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats.hf_source import has_prediction_layers

DECODE_CONTEXT = "decode_context_parallel_size"
"""vLLM's option for the number of workers that divide a KV cache."""
PACKAGES: Mapping[str, tuple[str, str]] = {
    "ngram": ("numba", "numba==0.65.0"),
    "suffix": ("arctic_inference", "arctic-inference"),
}
"""Method -> (module that vLLM imports for it, package to install)."""


def check_speculation(config: Config, job: Job) -> None:
    """Raise ConfigError if engines cannot draft with these settings, or would draft with old weights."""
    method, rollout = config.rollout.speculative, config.rollout
    if method == "none":
        return
    given = f"rollout.speculative={method}"
    if method == "mtp":
        _check_draft_layers(config, job)
    if rollout.routing_replay:
        raise ConfigError(
            f"{given} with rollout.routing_replay=true: expert ids of rejected drafts would be recorded as those of "
            "sampled tokens; set one of them back"
        )
    if rollout.pp > 1:
        raise ConfigError(
            f"{given} with rollout.pp={rollout.pp}: vLLM 0.32 looks for a drafter on every pipeline stage, but "
            "makes it on the last alone; set rollout.pp=1 and raise rollout.tp, or set speculative to none"
        )
    module, package = PACKAGES.get(method, ("vllm", "vllm"))
    if importlib.util.find_spec("vllm") and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{given}: vLLM drafts with {module}, which is not installed; pip install {package}, or set it to none"
        )


def _check_draft_layers(config: Config, job: Job) -> None:
    """Raise ConfigError if an engine's draft layers would lose the values of ``model.path``, or are not compared with
    that checkpoint."""
    rollout, sync = config.rollout, config.sync
    reasons = {
        "rollout.placement=colocated: its engines free or never read draft layers, and no sync brings these": (
            rollout.is_colocated
        ),
        f"run.mode={job.mode}: only engines of a trainer's own job compare draft layers with the files": (
            job.mode != "both"
        ),
        f"sync.cold_interval={sync.cold_interval}: the files of its engine have no draft layers": (
            sync.cold_interval is not None
        ),
        f"model.lora.rank={config.model.lora.rank}: drafts of models with adapters are untried": (
            config.model.lora.is_used
        ),
        f"rollout.weight_dtype={rollout.weight_dtype}: draft layers in 8 bits are not compared with the files": (
            rollout.weight_dtype != "auto"
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(f"rollout.speculative=mtp with {reason}; set one of them back, or speculative to ngram")


def check_prediction(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if engines cannot draft with the model's prediction layers, or it has none."""
    rollout, path = config.rollout, config.model.path
    if rollout.speculative != "mtp":
        return
    given, sizes = "rollout.speculative=mtp", architecture(hf_config).sizes(hf_config)
    if not has_prediction_layers(Path(path), hf_config):
        raise ConfigError(
            f"{given}: the model in {path} lacks prediction layers, or megarl has no table of them; take files that "
            "have them (megarl convert --mtp keep), or set it to ngram"
        )
    if sizes.kv_lora and config.parallel.backend == "gloo":
        raise ConfigError(
            f"{given} with parallel.backend=gloo: vLLM's latent attention on CPUs fails in draft layers; set it to "
            "ngram"
        )
    layers, tokens = sizes.mtp_layers, rollout.speculative_tokens
    if tokens > layers and tokens % layers:
        raise ConfigError(
            f"{given} with rollout.speculative_tokens={tokens}: vLLM takes a multiple of the model's {layers} "
            f"prediction layers; set it to {layers}"
        )


def check_delta_nets(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if an engine's kernels lack the dtype of the model's gated delta nets."""
    given, on_cpu = f"model.dtype={config.model.dtype}", config.parallel.backend == "gloo"
    if on_cpu and config.model.dtype != "bfloat16" and architecture(hf_config).sizes(hf_config).delta_layers:
        raise ConfigError(
            f"{given} with parallel.backend=gloo: vLLM computes gated delta nets on CPUs in bfloat16 alone; set "
            "model.dtype to bfloat16"
        )


def check_decode_context(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the engine's tensor-parallel workers can divide their KV cache by position.

    The workers' weights are those without it: workers that share a KV head already have copies of its projections.
    """
    rollout = config.rollout
    size = rollout.engine_options.get(DECODE_CONTEXT, 1)
    if size == 1:
        return
    given = f"rollout.engine_options.{DECODE_CONTEXT}={size!r}"
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{given}: it takes a whole number from 1 on")
    if config.parallel.backend == "gloo":
        raise ConfigError(
            f"{given} with parallel.backend=gloo: vLLM's attention on CPUs cannot merge parts of a context; leave "
            "it out"
        )
    if rollout.routing_replay:
        raise ConfigError(
            f"{given} with rollout.routing_replay=true: vLLM records no experts then; set one of them back"
        )
    if rollout.tp % size:
        raise ConfigError(f"{given} does not divide rollout.tp={rollout.tp}; set it to a divisor")
    sizes = architecture(hf_config).sizes(hf_config)
    if hf_config.get("kv_lora_rank") is not None:
        return
    if rollout.tp < sizes.kv_heads * size:
        raise ConfigError(
            f"{given} with rollout.tp={rollout.tp}: {size} workers for each of the model's {sizes.kv_heads} KV heads "
            f"are {size * sizes.kv_heads}; set rollout.tp to that or more, or leave the option out"
        )
    if (sizes.heads // sizes.kv_heads) % size:
        raise ConfigError(
            f"{given} does not divide the model's {sizes.heads // sizes.kv_heads} query heads of a KV head; set it to "
            "a divisor, or leave it out"
        )
