"""Checks of settings of an engine's start: ``rollout.engine_options``, memory and dtype of the KV cache."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.config.derived import context_tokens
from megarl.config.overrides import nearest
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job, ProcessKind
from megarl.engines.client.names import EIGHT_BIT_BLOCK
from megarl.run.checks.decoding import check_speculation
from megarl.run.nodes import gpu_state
from megarl.weights.architectures import architecture

SETTINGS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "hf_overrides": "model.head_dtype",
    "mm_processor_kwargs": "model.max_image_pixels",
    "limit_mm_per_prompt": "rollout.max_images",
    "max_model_len": "rollout.max_trajectory_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "block_size": "rollout.block_size",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "num_gpu_blocks_override": "rollout.kv_cache_bytes",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "tensor_parallel_size": "rollout.tp",
    "pipeline_parallel_size": "rollout.pp",
    "enable_expert_parallel": "rollout.expert_parallel",
    "enable_return_routed_experts": "rollout.routing_replay",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.offload",
    "nnodes": "rollout.nodes",
    "scheduling_policy": "sync.pause",
    "seed": "trainer.seed",
    "speculative_config": "rollout.speculative",
}
"""vLLM's option -> the megarl setting that determines it."""
WEIGHTS = (
    "quantization", "quantization_config", "allow_deprecated_quantization", "load_format", "model_loader_extra_config",
    "model_impl", "model_weights", "model_class_overrides", "config_format", "hf_config_path", "revision",
    "code_revision", "ignore_patterns", "*lora*", "cpu_offload_*", "offload_*", "enable_ep_weight_filter",
    "moe_backend", "linear_backend", "kernel_config",
    "mm_encoder_tp_mode", "mm_encoder_only", "language_model_only", "prefill_context_parallel_size", "dcp_q_replicate",
    "weight_transfer_config", "worker_cls", "worker_extension_cls", "runner", "convert", "sleep_*",
    "enable_cumem_allocator", "enable_nccl_comm_suspend", "pt_load_map_location", "additional_config",
)  # fmt: skip
MOVED_EXPERTS = ("*eplb*", "expert_placement_strategy", "*elastic_ep*")
SPREAD_EXPERTS = ("data_parallel_*",)
DISTRIBUTION = (
    "logprobs_mode", "spec_*", "generation_config", "override_generation_config",
    "watermark_config", "logits_processors", "kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill",
    "return_sampling_mask", "diffusion_config", "mm_encoder_attn_dtype", "tokenizer_*", "skip_tokenizer_init",
    "disable_sliding_window", "enable_prompt_embeds", "video_pruning_*", "*kv_transfer_config", "kv_events_config",
    "ec_*", "kv_offloading_*", "mm_encoder_fp8_*", "enable_mm_embeds", "engram_config",
)  # fmt: skip
CONTROL = (
    "host", "port", "uds", "api_key", "middleware", "ssl_*", "served_model_name", "node_rank", "master_addr",
    "master_port", "distributed_executor_backend", "disable_log_stats", "scheduler_cls", "max_num_queued_*",
    "trust_remote_code", "hf_token", "device_ids", "*fault_tolerance*", "tokens_only", "io_processor_plugin", "_*",
)  # fmt: skip
REASONS: Mapping[str, tuple[str, ...]] = {
    "decides what the engine's weights are, or where they lie: megarl compares them with what it sent": WEIGHTS,
    "moves experts between workers: slices would arrive at, and digests be compared with, other experts": MOVED_EXPERTS,
    "divides experts over data_parallel_size * rollout.tp workers, for which megarl has no layout (raise rollout.tp "
    "with rollout.expert_parallel=true, or rollout.replicas)": SPREAD_EXPERTS,
    "could let an engine sample from another distribution than the one whose log-probs it returns": DISTRIBUTION,
    "is how megarl starts, reaches or watches an engine": CONTROL,
}
"""Reason of a refusal -> option names or patterns."""
ON_CPU = (
    "enable_chunked_prefill",
    "compilation_config",
    "optimization_level",
    "attention_backend",
    "attention_config",
    "max_num_scheduled_tokens",
)
"""Options that megarl must set, because vLLM's CPU build computes wrongly without them
(``run/supervise/process_specs.py``)."""


def check_engine_options(config: Config) -> None:
    """Raise ConfigError for an option that vLLM lacks or megarl sets itself, or with a value of the wrong type."""
    known = engine_arguments() if config.rollout.engine_options else {}  # 0.3 s of CPU
    for name, value in config.rollout.engine_options.items():
        given = f"rollout.engine_options.{name}={value!r}"
        if name in SETTINGS:
            raise ConfigError(f"{given}: {SETTINGS[name]} decides it; leave it out and set that")
        for reason, patterns in REASONS.items():
            if any(fnmatch(name, pattern) for pattern in patterns):
                raise ConfigError(f"{given}: it {reason}; leave it out")
        if config.parallel.backend == "gloo" and name in ON_CPU:
            raise ConfigError(f"{given}: vLLM computes wrongly on CPUs unless megarl sets it; leave it out")
        if not known:  # no vLLM here: the job is for other machines
            continue
        if name not in known:
            raise ConfigError(f"{given}: the vLLM that is installed has no such option;{nearest(name, sorted(known))}")
        if value is None:
            raise ConfigError(f"{given}: it has no value; give one, or leave it out")
        kinds = known[name]
        if isinstance(value, bool) != ("bool" in kinds) and not ("bool" in kinds and len(kinds) > 1):
            wanted = "true or false" if "bool" in kinds else "a value, not true or false"
            raise ConfigError(f"{given}: this option takes {wanted}")


def check_batched_tokens(config: Config) -> None:
    """Raise ConfigError if the longest prompt exceeds a batch of an engine on CPUs, where prefills are not chunked."""
    tokens, context = config.rollout.engine_options.get("max_num_batched_tokens"), context_tokens(config.rollout)
    if config.parallel.backend == "gloo" and isinstance(tokens, int) and tokens < context:
        raise ConfigError(
            f"rollout.engine_options.max_num_batched_tokens={tokens} is less than a trajectory's {context} tokens, and "
            f"engines on CPUs compute a prompt in one batch; set it to {context} or more, or leave it out"
        )


@functools.cache
def engine_arguments() -> Mapping[str, tuple[str, ...]]:
    """Read vLLM's engine arguments from its source: name -> names of its types except None.

    Importing vLLM would take ten seconds. Returns {} if vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    found: dict[str, tuple[str, ...]] = {}
    for item in ast.parse(source.read_text()).body:
        if isinstance(item, ast.ClassDef) and item.name in ("EngineArgs", "AsyncEngineArgs"):
            for line in item.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    kinds = [kind.strip() for kind in ast.unparse(line.annotation).split("|")]
                    found[line.target.id] = tuple(kind for kind in kinds if kind != "None")
    return found


EIGHT_BIT_CAPABILITY, BLOCK_CAPABILITY = 8.9, 9.0
"""Minimum compute capability of 8-bit products in vLLM, for linear layers with a scale per channel and Triton's kernel
of experts."""


def check_engine_settings(config: Config, job: Job) -> None:
    """Raise ConfigError if engines cannot start with these settings, or their samples cannot be trained on."""
    if not job.rollouts:
        return
    _check_cache_size(config)
    _check_dtypes(config, job)
    check_engine_options(config)
    check_speculation(config, job)


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
    """Raise ConfigError if no GPU of this machine supports the 8-bit layers of vLLM or TransformerEngine. Passes if
    nvidia-smi lists no GPU: other nodes must have this node's GPUs."""
    fp8 = config.model.fp8
    asked = {
        "rollout.weight_dtype=fp8": ("vLLM", "auto", EIGHT_BIT_CAPABILITY),
        f"model.fp8={fp8}": (
            "TransformerEngine",
            "null",
            EIGHT_BIT_CAPABILITY if fp8 != "blockwise" else BLOCK_CAPABILITY,
        ),
    }
    if config.rollout.weight_dtype == "auto" or not job.has(ProcessKind.ENGINE):
        del asked["rollout.weight_dtype=fp8"]
    if fp8 is None or not job.has(ProcessKind.TRAINER):
        del asked[f"model.fp8={fp8}"]
    newest = gpu_state.newest_capability(gpu_state.gpus()) if asked else None
    for setting, (package, off, least) in asked.items():
        if newest is not None and newest < least:
            raise ConfigError(
                f"{setting} on GPUs of compute capability {newest}: {package} multiplies in 8 bits like this from "
                f"{least} on (Ada is 8.9, Hopper 9.0); set it to {off}, or take newer GPUs"
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
    if config.model.fp8 is not None:
        given.append(f"model.fp8={config.model.fp8}")
    if not given or job.mode == "bench":
        return
    fix = "model.fp8=null" if given[0].startswith("model.") else f"{given[0].partition('=')[0]}=auto"
    if config.algorithm.correction == "none":
        raise ConfigError(
            f"{given[0]} without algorithm.correction: engines sample from another distribution than the trainer's; "
            f"set algorithm.correction=truncate, or {fix}"
        )
    if None in (config.sync.probe_tolerance, config.sync.sample_tolerance):
        raise ConfigError(
            f"{given[0]} without sync.probe_tolerance and sync.sample_tolerance, whose defaults hold for weights and a "
            "cache of model.dtype; set both (0.06 and 0.1 are a beginning)"
        )
