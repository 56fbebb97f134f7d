"""Checks of ``rollout.engine_options``: names in the installed vLLM, and names that megarl sets itself."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from megarl.config import Config
from megarl.config.lengths import context_tokens
from megarl.config.overrides import nearest
from megarl.core.errors import ConfigError

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
}
"""vLLM's option -> the megarl setting that determines it."""
WEIGHTS = (
    "quantization", "quantization_config", "allow_deprecated_quantization", "load_format", "model_loader_extra_config",
    "model_impl", "model_weights", "model_class_overrides", "config_format", "hf_config_path", "revision",
    "code_revision", "ignore_patterns", "*lora*", "cpu_offload_*", "offload_*", "*eplb*", "*elastic_ep*",
    "expert_placement_strategy", "enable_ep_weight_filter", "moe_backend", "linear_backend", "kernel_config",
    "mm_encoder_tp_mode", "mm_encoder_only", "language_model_only", "data_parallel_*", "*context_parallel_size",
    "weight_transfer_config", "worker_cls", "worker_extension_cls", "runner", "convert", "sleep_*",
    "enable_cumem_allocator", "enable_nccl_comm_suspend", "pt_load_map_location", "additional_config",
)  # fmt: skip
DISTRIBUTION = (
    "logprobs_mode", "speculative_config", "spec_*", "generation_config", "override_generation_config",
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
(``run/supervise/engine_process.py``)."""


def check_engine_options(config: Config) -> None:
    """Raise ConfigError for an option that vLLM lacks or megarl sets itself, or with a value of the wrong type."""
    known = engine_arguments()
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
