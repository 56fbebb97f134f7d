"""Command line and environment of a rollout engine: vLLM's OpenAI server in separate processes. Imports no vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megarl.config.lengths import context_tokens
from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.core.durable import read_json
from megarl.engines.client.names import ADAPTERS, CPU_ROUTING, EIGHT_BITS, LORA_RANKS, PLUGIN
from megarl.run.checks.models.vision import is_vision_model
from megarl.tasks.images.pixels import pixel_limits
from megarl.tasks.images.rows import MAX_IMAGES

_PREFILL_TOKENS = 8192
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request compiles for 19 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind to the cores that trainer ranks use
}

_FLOAT32_ENVIRONMENT = {
    # Triton's attention, the only backend for float32, and convolutions multiply in TF32 by default.
    "TRITON_F32_DEFAULT": "ieee",
    "NVIDIA_TF32_OVERRIDE": "0",
}


def engine_process(
    model_path: str,
    rollout: RolloutConfig,
    model: ModelConfig,
    host: str,
    port: int,
    device: Literal["cpu", "cuda"] = "cpu",
    group: tuple[int, str] | None = None,
    pause: Literal["wait", "keep"] = "wait",
    leaves: Literal["sleep", "memory", "destroy"] | None = None,
    adapter: Literal["merged", "separate"] = "merged",
) -> tuple[list[str], dict[str, str]]:
    """Return (argv, environment to add) of one engine server that listens on ``host:port``.

    The server requires the job's key on every path, so ``$MEGARL_JOB_KEY`` must also be in its environment.

    Args:
        group: For an engine over ``rollout.nodes`` machines: (number of this part, HOST:PORT of the parts' rendezvous).
            Part 0 is the server.
        pause: ``sync.pause``. With ``keep`` the engine schedules by priority: a probe overtakes waiting requests.
        leaves: How the engine frees its device for trainer ranks (``rollout.offload``); None if it shares no device.
        adapter: ``sync.adapter``.
    """
    context = context_tokens(rollout)
    is_server = group is None or group[0] == 0
    argv = [
        sys.executable,
        "-m",
        "megarl.engines.server.server" if is_server else "megarl.engines.server.remote_workers",
    ]
    argv += ["--model", model_path, "--served-model-name", "policy", "--host", host, "--port", str(port)]
    argv += ["--dtype", model.dtype, "--max-model-len", str(context), "--generation-config", "vllm"]
    if model.head_dtype is not None:
        argv += ["--hf-overrides", json.dumps({"head_dtype": model.head_dtype})]
    argv += _image_options(model_path, model, rollout)
    argv += ["--max-num-seqs", str(rollout.max_num_seqs), "--block-size", str(rollout.block_size)]
    if rollout.cache_bytes is not None:
        argv += ["--kv-cache-memory-bytes", str(rollout.cache_bytes)]
    if rollout.kv_cache_dtype != "auto":
        argv += ["--kv-cache-dtype", rollout.kv_cache_dtype]
    if rollout.weight_dtype != "auto":
        argv += ["--quantization", "online", "--quantization-config", json.dumps(EIGHT_BITS)]
    argv += ["--tensor-parallel-size", str(rollout.tp), "--pipeline-parallel-size", str(rollout.pp)]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-log-stats"]
    argv += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    argv += ["--middleware", "megarl.engines.client.auth.RequireKey"]
    argv += ["--weight-transfer-config", json.dumps({"backend": PLUGIN})]
    argv += ["--worker-extension-cls", "megarl.engines.sync.receiver.WorkerExtension"]
    environment = engine_environment(rollout, device)
    if adapter == "separate" and model.lora.is_used:
        argv += adapter_options(model_path, model.lora)
        environment[ADAPTERS] = "1"
    if group is not None:
        part, (meeting, _, meeting_port) = group[0], group[1].rpartition(":")
        argv += [
            "--nnodes",
            str(rollout.nodes),
            "--node-rank",
            str(part),
            "--master-addr",
            meeting,
            "--master-port",
            meeting_port,
        ]
        argv += ["--distributed-executor-backend", "mp"]
    if pause == "keep":
        argv += ["--scheduling-policy", "priority"]
    if rollout.expert_parallel:
        argv += ["--enable-expert-parallel"]
    if rollout.routing_replay:
        argv += ["--enable-return-routed-experts"]
    if leaves == "destroy":
        # A sync brings all weights after the start, so reading them from disk would be wasted.
        argv += ["--load-format", "dummy"]
    if device == "cpu":
        argv += cpu_options(model_path, rollout)
        # A seeded request with a chunked prefill kills the engine on CPU ("CPU Generator does not use offset").
        argv += ["--no-enable-chunked-prefill"]
        if "max_num_batched_tokens" not in rollout.engine_options:
            argv += ["--max-num-batched-tokens", str(max(context, _PREFILL_TOKENS))]
        if rollout.tp * rollout.pp == 1:
            argv += ["--distributed-executor-backend", "uni"]  # see engine_environment
    else:
        # Other backends permute the experts' weights for their kernels, so the weights could not be read back. vLLM
        # would choose one on Blackwell.
        argv += ["--moe-backend", "triton"]
        if model.dtype == "float32":
            environment |= _FLOAT32_ENVIRONMENT
        # vLLM refuses to start if less than this share of a GPU is free (default 0.92), even with a given cache size.
        # When colocated, a trainer rank already uses memory of the same GPU.
        argv += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization or 0.01)]
        if rollout.enforce_eager:
            argv += ["--enforce-eager"]
        if leaves in ("sleep", "memory"):
            argv += ["--enable-sleep-mode"]  # allocates weights and cache from vLLM's sleep pool
    return [*argv, *_further_options(rollout.engine_options)], environment


def engine_environment(rollout: RolloutConfig, device: Literal["cpu", "cuda"] = "cpu") -> dict[str, str]:
    """Return the environment variables to add for an engine's processes."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": str(rollout.num_threads),
    }
    if rollout.routing_replay:
        environment |= {CPU_ROUTING: "1"} if device == "cpu" else {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if device == "cpu":
        environment |= _CPU_ENVIRONMENT
        if rollout.tp * rollout.pp == 1:
            # One process fewer saves 8 s of imports, 0.5 GB and a hop per step. On CPU vLLM has a worker process only
            # to set its OpenMP environment, which is set above.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def _further_options(options: Mapping[str, Any]) -> list[str]:
    """Return ``rollout.engine_options`` as arguments of vLLM's command line."""
    argv: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv += [f"--{flag}" if value else f"--no-{flag}"]
        elif isinstance(value, list):
            argv += [f"--{flag}", *map(str, value)]
        else:
            argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return argv


def _image_options(model_path: str, model: ModelConfig, rollout: RolloutConfig) -> list[str]:
    """Return the options of a model that takes images; [] for other models."""
    if not is_vision_model(read_json(Path(model_path) / "config.json")):
        return []
    options = ["--limit-mm-per-prompt", json.dumps({"image": max(MAX_IMAGES, rollout.max_images), "video": 0})]
    options += ["--mm-encoder-tp-mode", "data"]  # each worker has, and receives, the whole tower
    if (model.min_image_pixels, model.max_image_pixels) != (None, None):
        limits = pixel_limits(model_path, model.min_image_pixels, model.max_image_pixels)
        options += ["--mm-processor-kwargs", json.dumps({"size": limits.size})]
    return options


def adapter_options(model_path: str, lora: LoraConfig) -> list[str]:
    """Return the options of an engine that applies adapters separately: LoRA layers where the model has adapters."""
    from megarl.weights.checkpoint.formats.hf_source import read_hf_config  # these import torch and transformers
    from megarl.weights.reshard.adapters import factors_of
    from megarl.weights.reshard.layouts import vllm_layout

    hf_config = read_hf_config(Path(model_path))
    factors = factors_of(hf_config, lora)
    rows = (row for row in vllm_layout(hf_config, 1).rows if not factors.keys().isdisjoint(row.parts))
    layers = sorted({row.local.removesuffix(".weight").rpartition(".")[2] for row in rows})
    largest = max(own.rank for own in factors.values())
    options = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(min(r for r in LORA_RANKS if r >= largest))]
    return [*options, "--lora-target-modules", *layers]


def cpu_options(model_path: str, rollout: RolloutConfig) -> list[str]:
    """Return the options with which vLLM 0.32.0's CPU build computes correctly."""
    compilation: dict[str, Any] = {}
    options: list[str] = []
    if rollout.pp == 1:
        options += ["--enforce-eager"]
    else:
        # Later stages allocate their input buffers during warm-up, which eager mode skips. Nothing is compiled in
        # either mode.
        compilation |= {"mode": 1, "custom_ops": ["all"]}
    if _is_mla(model_path):
        # The CPU kernel rotates only the first head of latent attention's queries. On machines with AMX vLLM would
        # choose another backend, whose projection cannot be loaded twice.
        compilation.setdefault("custom_ops", []).append("-rotary_embedding")
        options += ["--attention-backend", "CPU_MLA"]
    return [*options, "--compilation-config", json.dumps(compilation)] if compilation else options


def _is_mla(model_path: str) -> bool:
    from megarl.weights.checkpoint.formats.hf_source import read_hf_config  # imports torch and transformers

    path = Path(model_path)
    return (path / "config.json").is_file() and read_hf_config(path).get("kv_lora_rank") is not None
