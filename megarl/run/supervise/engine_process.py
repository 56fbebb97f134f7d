"""Command line and environment of a rollout engine: vLLM's OpenAI server in processes of its own. Imports no vLLM."""

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
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for 19 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding takes the cores that trainer ranks run on
}

_FLOAT32_ENVIRONMENT = {
    # Triton's attention, the only one that takes float32, and convolutions multiply in TF32 unless told.
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
    """Returns (argv, environment to add) of one engine server that listens on ``host:port``.

    It asks for the job's key on every path: ``$MEGARL_JOB_KEY`` must be in its environment as well.

    Args:
        group: Of an engine that spans ``rollout.nodes`` machines: which part this is, and HOST:PORT where the parts
            meet. Part 0 is the server.
        pause: ``sync.pause``. With ``keep`` the engine has priorities: a probe goes before requests that wait.
        leaves: How it gives its device to trainer ranks (``rollout.offload``); None where it has one of its own.
        adapter: ``sync.adapter``.
    """
    context = context_tokens(rollout)
    kind = "server" if group is None or group[0] == 0 else "part"
    argv = [sys.executable, "-m", f"megarl.engines.server.{kind}"]
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
        # Started for a sync, which brings all weights: a read from disk would be for nothing.
        argv += ["--load-format", "dummy"]
    if device == "cpu":
        argv += cpu_options(model_path, rollout)
        # A seeded request whose prefill is cut in two kills the engine on CPU ("CPU Generator does not use offset").
        argv += ["--no-enable-chunked-prefill"]
        if "max_num_batched_tokens" not in rollout.engine_options:
            argv += ["--max-num-batched-tokens", str(max(context, _PREFILL_TOKENS))]
        if rollout.tp * rollout.pp == 1:
            argv += ["--distributed-executor-backend", "uni"]  # see engine_environment
    else:
        # Others permute the experts' weights for their kernels (on Blackwell it would choose one): they could not be
        # read back.
        argv += ["--moe-backend", "triton"]
        if model.dtype == "float32":
            environment |= _FLOAT32_ENVIRONMENT
        # vLLM refuses to start where less than this share of a GPU is free, 0.92 unless told, even with the bytes of
        # its cache given: colocated, a trainer rank has memory of the same GPU already.
        argv += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization or 0.01)]
        if rollout.enforce_eager:
            argv += ["--enforce-eager"]
        if leaves in ("sleep", "memory"):
            argv += ["--enable-sleep-mode"]  # its memory comes from vLLM's pool then
    return [*argv, *_further_options(rollout.engine_options)], environment


def engine_environment(rollout: RolloutConfig, device: Literal["cpu", "cuda"] = "cpu") -> dict[str, str]:
    """Environment to add of an engine's processes."""
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
            # One process fewer: 8 s of imports, 0.5 GB and a hop a step. vLLM keeps a worker process on CPU only to set
            # its OpenMP environment, which is set above; this variable is its way to be told so.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def _further_options(options: Mapping[str, Any]) -> list[str]:
    """Options of ``rollout.engine_options`` as vLLM's command line has them."""
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
    """Options of a model that takes images, none of another."""
    if not is_vision_model(read_json(Path(model_path) / "config.json")):
        return []
    options = ["--limit-mm-per-prompt", json.dumps({"image": max(MAX_IMAGES, rollout.max_images), "video": 0})]
    options += ["--mm-encoder-tp-mode", "data"]  # the tower is whole on each worker, and is sent whole
    if (model.min_image_pixels, model.max_image_pixels) != (None, None):
        limits = pixel_limits(model_path, model.min_image_pixels, model.max_image_pixels)
        options += ["--mm-processor-kwargs", json.dumps({"size": limits.size})]
    return options


def adapter_options(model_path: str, lora: LoraConfig) -> list[str]:
    """Options of an engine that computes with adapters of its own: LoRA layers where the model has adapters."""
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
    """Options with which vLLM 0.32.0's CPU build computes correctly."""
    compilation: dict[str, Any] = {}
    options: list[str] = []
    if rollout.pp == 1:
        options += ["--enforce-eager"]
    else:
        # A later stage makes its input buffers while it warms up, which eager mode leaves out; nothing is compiled
        # either way.
        compilation |= {"mode": 1, "custom_ops": ["all"]}
    if _is_mla(model_path):
        # Its rotary kernel rotates the first head of latent attention's queries only. On machines with AMX vLLM would
        # choose another backend, whose projection cannot be loaded a second time.
        compilation.setdefault("custom_ops", []).append("-rotary_embedding")
        options += ["--attention-backend", "CPU_MLA"]
    return [*options, "--compilation-config", json.dumps(compilation)] if compilation else options


def _is_mla(model_path: str) -> bool:
    from megarl.weights.checkpoint.formats.hf_source import read_hf_config  # imports torch and transformers

    path = Path(model_path)
    return (path / "config.json").is_file() and read_hf_config(path).get("kv_lora_rank") is not None
