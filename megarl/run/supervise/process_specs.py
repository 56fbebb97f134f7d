"""Specs of an attempt's processes: the command line, environment, log and devices of each.

Imports no vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megarl.buffer.store import VARIABLE
from megarl.config import Config, save_resolved
from megarl.config.derived import context_tokens
from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.core.durable import read_json
from megarl.core.jobs import KEEPS, NODE, REWARD_HOSTS, ProcessKind, of_program, worker_of
from megarl.core.metrics import TIMELINE
from megarl.engines.client.names import (
    ADAPTERS,
    COLD,
    COLD_FOLDER,
    CPU_ROUTING,
    EIGHT_BITS,
    LORA_RANKS,
    PLUGIN,
    UNTIL_PUBLISHED,
)
from megarl.learn import algorithms
from megarl.rewards.judge.family import ENGINES
from megarl.run.checks.vision import is_vision_model
from megarl.run.nodes.node import Spec
from megarl.run.nodes.plan import Plan, Planned
from megarl.run.process.process import ForkServers
from megarl.tasks.image_processor import pixel_limits
from megarl.tasks.image_rows import MAX_IMAGES
from megarl.weights.checkpoint.training.disk_space import written

_PREFILL_TOKENS = 8192
NGRAM = 2, 5
"""Fewest and most tokens at a sequence's end that ``rollout.speculative=ngram`` looks for earlier in the sequence."""
_UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""For processes on CPU. An engine's first request would compile for 19 s; a rank of a model with experts or with gated
attention would compile Megatron's fusions for 3 to 8 s at each start."""
_CPU_ENVIRONMENT = {
    **_UNCOMPILED,
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
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    # Accepted drafts are counted in vLLM's statistics alone.
    argv += ["--disable-log-stats"] if rollout.speculative == "none" else _speculative_options(rollout)
    argv += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    argv += ["--middleware", "megarl.engines.client.names.RequireKey"]
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
            # A full batch would cut drafts short, so that seeded samples would depend on other requests.
            drafted = rollout.max_num_seqs * (1 + rollout.speculative_tokens)
            argv += ["--max-num-batched-tokens", str(max(context, _PREFILL_TOKENS, drafted))]
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
        "VLLM_DCP_Q_REPLICATE": "0",  # with decode context parallelism workers would hold other slices of queries
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": str(rollout.num_threads),
    }
    if rollout.speculative == "ngram":
        # Numba would otherwise set OpenMP's threads to all cores, for torch too: ten times slower on busy CPUs.
        environment["NUMBA_NUM_THREADS"] = str(rollout.num_threads)
    if rollout.routing_replay:
        environment |= {CPU_ROUTING: "1"} if device == "cpu" else {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if device == "cpu":
        environment |= _CPU_ENVIRONMENT
        if rollout.tp * rollout.pp == 1:
            # One process fewer saves 8 s of imports, 0.5 GB and a hop per step. On CPU vLLM has a worker process only
            # to set its OpenMP environment, which is set above.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def _speculative_options(rollout: RolloutConfig) -> list[str]:
    """Return the options of an engine that verifies drafts."""
    speculative: dict[str, Any] = {"method": rollout.speculative, "num_speculative_tokens": rollout.speculative_tokens}
    if rollout.speculative == "ngram":
        speculative |= {"prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
    return ["--speculative-config", json.dumps(speculative)]


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
    model = _settings(model_path)
    latent, convolutions = (model.get(key) is not None for key in ("kv_lora_rank", "conv_L_cache"))
    if convolutions or model.get("linear_num_key_heads") is not None:
        options += ["--no-enable-prefix-caching"]  # states of prefixes need chunked prefills, which are off
    if latent or convolutions:
        # The CPU kernel rotates only the first head of queries with an axis of heads, which these models' classes give.
        compilation.setdefault("custom_ops", []).append("-rotary_embedding")
    if latent:
        # On machines with AMX vLLM would choose another backend, whose projection cannot be loaded twice.
        options += ["--attention-backend", "CPU_MLA"]
    return [*options, "--compilation-config", json.dumps(compilation)] if compilation else options


def _settings(model_path: str) -> Mapping[str, Any]:
    from megarl.weights.checkpoint.formats.hf_source import read_hf_config  # imports torch and transformers

    path = Path(model_path)
    return read_hf_config(path) if (path / "config.json").is_file() else {}


Placed = tuple[int, Spec]
"""(rank of a node, process to start there)."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment variables of processes that need only one compute thread."""


class Addresses(NamedTuple):
    """Addresses of an attempt's servers, HOST:PORT."""

    rendezvous: str
    link: str
    engines: tuple[str, ...]
    engine_groups: tuple[str, ...]
    """Rendezvous of the parts of each engine; "" for an engine on one node."""
    reward_hosts: tuple[str, ...]


class _Command(NamedTuple):
    """Command line of a planned process."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables of this process, in addition to the variables of all."""
    listens: str = ""


@dataclass(frozen=True)
class _Attempt:
    config: Config
    plan: Plan
    addresses: Addresses
    logs: Path


def urls(addresses: Addresses) -> list[str]:
    """Return the URLs of the engines, by number."""
    return [f"http://{address}" for address in addresses.engines]


def resolved(config: Config) -> Path:
    """Return the file with a run's settings, which its processes read. A program that joins the run has a separate
    file."""
    job = algorithms.job_of(config)
    return Path(config.run.dir) / f"{of_program('resolved', job.program) if job.joins else 'resolved'}.json"


def record_settings(config: Config) -> None:
    """Write the settings for the run's processes; wait up to ``store.outage_s`` for space on a full disk. Raises
    JobError."""
    path = resolved(config)
    written(path, partial(save_resolved, config, path), config.store.outage_s)


def specs(config: Config, plan: Plan, addresses: Addresses, environment: Mapping[str, str], logs: Path) -> list[Placed]:
    """Return the processes of a plan in the order of their start.

    ``environment``: variables of the attempt, for all processes.
    """
    env = {
        **environment,
        "MEGARL_LINK": addresses.link,
        REWARD_HOSTS: ",".join(f"{address}*{config.reward.workers}" for address in addresses.reward_hosts),
        "PYTHONUNBUFFERED": "1",
    }
    if VARIABLE in os.environ:  # other nodes do not inherit this process's environment
        env[VARIABLE] = os.environ[VARIABLE]
    attempt, placed = _Attempt(config, plan, addresses, logs), []
    for process in plan.processes:
        argv, own, listens = _COMMANDS[process.kind](attempt, process)
        first = process.kind is plan.job.until and process.number == 0
        log = str(logs / process.log)
        spec = Spec(process.name, tuple(argv), {**env, **own}, log, first, listens, process.gpus)
        placed.append((process.node, spec))
    return placed


def another_engine(
    config: Config, plan: Plan, number: int, address: str, log: str, environment: Mapping[str, str]
) -> Spec:
    """Return the spec of an engine of ``plan`` that joins an attempt at ``address``; its log is next to ``log``."""
    logs = Path(log).parent
    addresses = Addresses("", "", ("",) * number + (address,), ("",) * (number + 1), ())
    process = plan.of(ProcessKind.ENGINE)[number]
    argv, own, listens = _engine(_Attempt(config, plan, addresses, logs), process)
    env = {**environment, **own}
    return Spec(process.name, tuple(argv), env, str(logs / process.log), listens=listens, gpus=process.gpus)


def preload(config: Config, servers: ForkServers) -> None:
    """Make fork servers import the modules of the job's processes while the job is checked."""
    for kind in algorithms.job_of(config).processes:
        if kind is ProcessKind.ENGINE:
            servers.preload(kind, engine_environment(config.rollout))
        elif kind is ProcessKind.TRAINER:
            servers.preload(kind, _trainer_environment(config))
        elif kind is ProcessKind.EXPLORER:
            servers.preload(kind, ONE_THREAD)


def _trainer_environment(config: Config) -> dict[str, str]:
    compiled = {} if config.parallel.backend == "nccl" else _UNCOMPILED
    return {"OMP_NUM_THREADS": str(config.trainer.num_threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1", **compiled}


def _engine(attempt: _Attempt, process: Planned) -> _Command:
    config, address = attempt.config, attempt.addresses.engines[process.number]
    host, _, port = address.rpartition(":")
    group = attempt.addresses.engine_groups[process.number]
    span = (process.part, group) if group else None
    device: Literal["cpu", "cuda"] = "cuda" if config.parallel.backend == "nccl" else "cpu"
    leaves = config.rollout.offload if attempt.plan.takes_turns else None
    argv, env = engine_process(
        config.model.path, config.rollout, config.model, host, int(port), device, span, config.sync.pause, leaves,
        config.sync.adapter,
    )  # fmt: skip
    name = of_program(f"{process.kind.stem}_{process.number}", attempt.plan.job.program)
    timeline = f"{config.run.dir}/timeline/{name}"
    env |= {UNTIL_PUBLISHED: "1", TIMELINE: timeline, COLD: f"{config.run.dir}/{COLD_FOLDER}"}
    return _Command(argv[1:], env, "" if process.part else address)


def _trainer(attempt: _Attempt, process: Planned) -> _Command:
    config = attempt.config
    host, _, port = attempt.addresses.rendezvous.rpartition(":")
    neighbours = [rank for rank in attempt.plan.of(process.kind) if rank.node == process.node]
    env = {
        "RANK": str(process.number),
        "LOCAL_RANK": str(neighbours.index(process)),
        "WORLD_SIZE": str(config.parallel.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        **_trainer_environment(config),
    }
    if (keep := config.trainer.keep_state) != "off":
        env |= {KEEPS: keep, NODE: str(process.node)}
    return _Command(_started(attempt, process), env)


def _reward_host(attempt: _Attempt, process: Planned) -> _Command:
    hosts = attempt.plan.of(process.kind)
    address = attempt.addresses.reward_hosts[hosts.index(process)]
    host, _, port = address.rpartition(":")
    argv = ["-m", "megarl", "rewards", "serve", "--host", host, "--port", port]
    argv += ["--workers", str(attempt.config.reward.workers)]
    argv += ["--output", str(attempt.logs / f"reward_output_{process.node}.log")]
    return _Command(argv, {**ONE_THREAD, ENGINES: ",".join(urls(attempt.addresses))}, address)


def _bench(attempt: _Attempt, process: Planned) -> _Command:
    return _Command(_started(attempt, process), ONE_THREAD)


def _explorer(attempt: _Attempt, process: Planned) -> _Command:
    number = process.number
    worker = ["--worker", worker_of(attempt.plan.job.program, number), "--number", str(number)]
    return _Command([*_started(attempt, process), *worker], ONE_THREAD)


def _started(attempt: _Attempt, process: Planned) -> list[str]:
    return ["-m", "megarl.run.start", process.kind.stem, "--config", str(resolved(attempt.config))]


_COMMANDS: Mapping[ProcessKind, Callable[[_Attempt, Planned], _Command]] = {
    ProcessKind.ENGINE: _engine,
    ProcessKind.TRAINER: _trainer,
    ProcessKind.REWARD_HOST: _reward_host,
    ProcessKind.EXPLORER: _explorer,
    ProcessKind.BENCH: _bench,
}
