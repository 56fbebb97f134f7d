"""What engines are started with, refused where it could not work or would break a proof."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megarl import ops
from megarl.config import Config
from megarl.config.schema import ModelConfig, ParallelConfig, RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS
from megarl.learn import algorithms
from megarl.run.checks.decoding import DECODE_CONTEXT, check_decode_context, check_delta_nets, check_prediction
from megarl.run.checks.engine_options import (
    ON_CPU,
    REASONS,
    SETTINGS,
    check_batched_tokens,
    check_eight_bits,
    check_engine_options,
    check_engine_settings,
    engine_arguments,
)
from megarl.run.checks.memory import check_engine_devices, engine_bytes
from megarl.run.checks.settings import check_builds
from megarl.run.supervise.process_specs import engine_process
from megarl.weights.architectures.complete import complete
from megarl.weights.checkpoint.formats.hf import read_hf_config
from tests.parallel.families import FAMILIES, hf_model
from tests.parallel.prediction_files import add_prediction
from tests.unit.small_job import config_of
from tests.unit.test_memory_checks import TINY

GPU = ("parallel.backend=nccl",)
EIGHT_BITS = ("rollout.weight_dtype=fp8", "model.dtype=bfloat16")
BOTH = ("sync.probe_tolerance=0.2", "sync.sample_tolerance=0.2")


def check(*overrides: str) -> None:
    config = config_of(Path("x"), *overrides)
    check_engine_settings(config, algorithms.job_of(config))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.gpu_memory_utilization=0.5"], "parallel.backend=gloo, whose engines are on CPUs; set it to null"),
        (
            [*GPU, "rollout.gpu_memory_utilization=0.5", "rollout.kv_cache_bytes=1073741824"],
            "rollout.kv_cache_bytes=1073741824: one of them decides",
        ),
        ([*GPU, "rollout.gpu_memory_utilization=0.5", "rollout.placement=colocated"], "set cluster.device_bytes to it"),
        (["rollout.kv_cache_dtype=fp8"], "parallel.backend=gloo: engines on CPUs are proven"),
        ([*GPU, "rollout.kv_cache_dtype=fp8"], "set algorithm.correction=truncate"),
        ([*GPU, "rollout.kv_cache_dtype=fp8", "algorithm.correction=mask"], "without sync.probe_tolerance"),
        (["rollout.weight_dtype=fp8"], "model.dtype=float32: vLLM makes 8 bits of bfloat16 alone"),
        (EIGHT_BITS, "rollout.weight_dtype=fp8 without algorithm.correction: .* or rollout.weight_dtype=auto"),
        ([*EIGHT_BITS, "algorithm.correction=mask"], "rollout.weight_dtype=fp8 without sync.probe_tolerance"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*overrides)


def test_caches_that_can_be() -> None:
    check()
    check(*GPU, "rollout.gpu_memory_utilization=0.5")
    check(*GPU, "rollout.gpu_memory_utilization=0.5", "rollout.placement=colocated", "cluster.device_bytes=80000000000")
    check(*GPU, "rollout.kv_cache_dtype=fp8", "algorithm.correction=mask", *BOTH)
    check(*EIGHT_BITS, "algorithm.correction=mask", *BOTH)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_token": 8}, "no such option; did you mean 'max_num_batched_tokens'"),
        ({"gpu_memory_utilization": 0.5}, "rollout.gpu_memory_utilization decides it"),
        ({"quantization": "fp8"}, "megarl compares them with what it sent"),
        ({"max_lora_rank": 8}, "megarl compares them with what it sent"),
        ({"spec_tokens": 3}, "another distribution"),
        ({"speculative_config": {}}, "rollout.speculative decides it"),
        ({"enable_eplb": True}, "moves experts between workers"),
        ({"data_parallel_size": 2}, "megarl has no layout"),
        ({"dcp_q_replicate": True}, "megarl compares them with what it sent"),
        ({"api_key": "x"}, "reaches or watches"),
        ({"compilation_config": {}}, "wrongly on CPUs"),
        ({"enable_prefix_caching": 1}, "takes true or false"),
        ({"stream_interval": True}, "takes a value"),
        ({"stream_interval": None}, "it has no value"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine_options(Config(rollout=RolloutConfig(engine_options=options)))


def test_options_that_can_be() -> None:
    options = {"max_num_batched_tokens": 4096, "enable_prefix_caching": False, "async_scheduling": True}
    check_engine_options(Config(rollout=RolloutConfig(engine_options=options)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_option_that_megarl_gives_is_its_own(tmp_path: Path, device: Any) -> None:
    """Else a user's would come after it on the command line, and win."""
    model = ModelConfig(head_dtype="float32", max_image_pixels=5000)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}, "kv_lora_rank": 512}')
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 12845056}')
    usual = RolloutConfig(max_prompt_tokens=8, expert_parallel=True, routing_replay=True, kv_cache_dtype="fp8")
    given: set[str] = set()
    ways: tuple[tuple[RolloutConfig, Any], ...] = (
        (usual, "destroy"),
        (replace(usual, pp=2, enforce_eager=True), "sleep"),
    )
    for rollout, leaves in ways:
        argv, _ = engine_process(
            str(tmp_path), rollout, model, "h", 1, device, group=(0, "h:1"), pause="keep", leaves=leaves
        )
        given |= {word[2:].replace("-", "_") for word in argv if word.startswith("--")}
    assert {"kv_cache_dtype", "scheduling_policy", "nnodes", "load_format"} < given
    backend: Any = "gloo" if device == "cpu" else "nccl"
    config = replace(Config(), parallel=replace(Config().parallel, backend=backend))
    server = {"enable_scale_out", "disable_uvicorn_access_log", "disable_fastapi_docs"}
    for name in given - server - {"max_num_batched_tokens"}:
        name = name.removeprefix("no_")
        with pytest.raises(ConfigError, match="decides it|megarl|another distribution"):
            check_engine_options(replace(config, rollout=RolloutConfig(engine_options={name: 1})))


def test_names_are_those_of_the_installed_vllm() -> None:
    known = engine_arguments()
    assert known["max_num_batched_tokens"] == ("int",) and known["hf_token"] == ("bool", "str")
    assert SETTINGS.keys() <= known.keys() and set(ON_CPU) <= known.keys()
    names = {pattern for patterns in REASONS.values() for pattern in patterns if pattern.isidentifier()}
    assert names - known.keys() == {"host", "port", "uds", "api_key", "middleware"}, "the server's own options"


def test_a_batch_on_a_cpu_holds_a_whole_prompt() -> None:
    rollout = RolloutConfig(
        max_prompt_tokens=100, max_response_tokens=28, engine_options={"max_num_batched_tokens": 127}
    )
    with pytest.raises(ConfigError, match="set it to 128 or more"):
        check_batched_tokens(Config(rollout=rollout))
    check_batched_tokens(Config(rollout=replace(rollout, engine_options={"max_num_batched_tokens": 128})))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.speculative=mtp", "rollout.placement=colocated"], "its engines free or never read draft layers"),
        (["rollout.speculative=mtp", "run.mode=explore"], "only engines of a trainer's own job compare draft layers"),
        (["rollout.speculative=mtp", "sync.cold_interval=5"], "the files of its engine have no draft layers"),
        (["rollout.speculative=mtp", "model.lora.rank=4"], "drafts of models with adapters are untried"),
        (["rollout.speculative=mtp", "rollout.pp=2"], "with rollout.pp=2: vLLM 0.32 looks for a drafter"),
        (["rollout.speculative=ngram", "rollout.routing_replay=true"], "expert ids of rejected drafts"),
        (["rollout.speculative=ngram", "rollout.pp=2"], "with rollout.pp=2: vLLM 0.32 looks for a drafter"),
        (["rollout.speculative=suffix"], "arctic_inference, which is not installed; pip install arctic-inference"),
    ],
)
def test_drafts_that_cannot_be_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*overrides)


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("qwen3", (), "lacks prediction layers, or megarl has no table of them"),
        ("plain glm4_moe", (), "lacks prediction layers"),
        ("glm4_moe", (), ""),
        ("deepseek_v3", (), "vLLM's latent attention on CPUs fails in draft layers"),
        ("deepseek_v3", GPU, ""),
        ("qwen3_5", (), ""),
    ],
)
def test_drafts_need_prediction_layers(tmp_path: Path, family: str, overrides: tuple[str, ...], words: str) -> None:
    hf_model(family.split()[-1]).save_pretrained(tmp_path)
    if family not in ("qwen3", "plain glm4_moe"):
        add_prediction(tmp_path)
    config = config_of(tmp_path, "rollout.speculative=mtp", *overrides)
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_prediction(config, read_hf_config(tmp_path))


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("qwen3_5", (), "model.dtype=float32 .* gated delta nets on CPUs in bfloat16 alone"),
        ("qwen3_5", ("model.dtype=bfloat16",), ""),
        ("qwen3_5", GPU, ""),
        ("lfm2", (), ""),
    ],
)
def test_delta_nets_on_cpus_are_in_bfloat16(family: str, overrides: tuple[str, ...], words: str) -> None:
    model_type, sizes = FAMILIES[family]
    hf_config = complete(AutoConfig.for_model(model_type, **sizes).to_dict())
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_delta_nets(config_of(Path("x"), *overrides), hf_config)


WIDE = (*GPU, "rollout.tp=8")


@pytest.mark.parametrize(
    ("size", "overrides", "words"),
    [
        (2, ("rollout.tp=8",), "attention on CPUs"),
        (3, WIDE, "does not divide rollout.tp=8"),
        (8, WIDE, "8 workers for each of the model's 2 KV heads are 16"),
        (0, WIDE, "takes a whole number"),
        (2, (*WIDE, "rollout.routing_replay=true"), "records no experts"),
        (2, WIDE, ""),
        (1, (), ""),
    ],
)
def test_workers_divide_a_context_where_they_share_a_head(size: Any, overrides: tuple[str, ...], words: str) -> None:
    model_type, sizes = FAMILIES["qwen3"]
    hf_config = AutoConfig.for_model(model_type, **sizes).to_dict()
    config = config_of(Path("x"), *overrides)
    config = replace(config, rollout=replace(config.rollout, engine_options={DECODE_CONTEXT: size}))
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_decode_context(config, hf_config)


REFUSED = "rollout.weight_dtype=fp8 on GPUs of compute capability {}: .* from 8.9 on"
REST = "81559, 1980, 345, P0, 0x0000000000000001, 0, No"
UNKNOWN = 'case "$1" in *compute_cap*) echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2;; esac'
EIGHT_BIT_JOB = replace(Config(), parallel=ParallelConfig(backend="nccl"), rollout=RolloutConfig(weight_dtype="fp8"))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"echo NVIDIA A100, 8.0, {REST}", REFUSED.format("8.0")),
        (f"echo NVIDIA A10, 8.6, {REST}; echo NVIDIA T4, 7.5, {REST}", REFUSED.format("8.6")),
        (f"echo NVIDIA A10, 8.6, {REST}; echo NVIDIA L4, 8.9, {REST}", ""),
        (f"echo NVIDIA H100 80GB HBM3, 9.0, {REST}", ""),
        (f"echo NVIDIA RTX PRO 6000, 12.0, {REST}", ""),
        (f"echo NVIDIA A100, [N/A], {REST}", ""),
        (f"{UNKNOWN}; echo NVIDIA A100, {REST}", ""),
        ("echo No devices were found; exit 6", ""),
        (None, ""),
    ],
)
def test_eight_bits_need_gpus_that_multiply_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_builds(EIGHT_BIT_JOB, JOBS["both"])
    check_builds(EIGHT_BIT_JOB, JOBS["train"])  # whose engines are of other programs
    trainer = replace(EIGHT_BIT_JOB, model=ModelConfig(fp8="tensorwise"))
    with pytest.raises(ConfigError, match="model.fp8=tensorwise on GPUs") if words else nullcontext():
        check_builds(trainer, JOBS["train"])
    check_builds(replace(EIGHT_BIT_JOB, rollout=RolloutConfig()), JOBS["both"])


@pytest.mark.parametrize(
    ("overrides", "changes", "words"),
    [
        ((), {"hidden_size": 192}, "hidden size 192 is no multiple of 128"),
        ((), {"moe_intermediate_size": 192}, "experts' width 192 a worker is no multiple of 128"),
        (("rollout.tp=2",), {}, "experts' width 64 a worker is no multiple"),
        (("rollout.tp=2", "rollout.expert_parallel=true"), {}, "takes all experts of a layer"),
    ],
)
def test_experts_in_eight_bits_come_in_whole_blocks(
    overrides: tuple[str, ...], changes: dict[str, int], words: str
) -> None:
    model_type, sizes = FAMILIES["qwen3_moe"]
    whole = {"hidden_size": 128, "moe_intermediate_size": 128}
    hf_config = AutoConfig.for_model(model_type, **{**sizes, **whole, **changes}).to_dict()
    with pytest.raises(ConfigError, match=words):
        check_eight_bits(config_of(Path("x"), *EIGHT_BITS, *overrides), hf_config)
    check_eight_bits(config_of(Path("x"), *overrides), hf_config)
    on_gpus = config_of(Path("x"), *GPU, *EIGHT_BITS, "rollout.tp=2", "rollout.expert_parallel=true")
    check_eight_bits(on_gpus, {**hf_config, **whole})
    (worker,) = engine_bytes(config_of(Path("x"), *EIGHT_BITS), {**hf_config, **whole})
    (plain,) = engine_bytes(config_of(Path("x"), "model.dtype=bfloat16"), {**hf_config, **whole})
    assert plain["engine.weights"] * 0.5 < worker["engine.weights"] < plain["engine.weights"] * 0.8


def test_a_share_of_a_device_bounds_an_engine() -> None:
    rollout = RolloutConfig(gpu_memory_utilization=0.5)
    config = replace(Config(rollout=rollout), cluster=replace(Config().cluster, device_bytes=2**30))
    (worker,) = engine_bytes(config, TINY)
    assert sum(worker.values()) == 2**29
    check_engine_devices(config, TINY, 2**30)
    small = replace(config, cluster=replace(config.cluster, device_bytes=worker["engine.weights"]))
    with pytest.raises(ConfigError, match="leave nothing for its KV cache of rollout.gpu_memory_utilization=0.5"):
        check_engine_devices(small, TINY, worker["engine.weights"])
