"""The engine's command line and environment, its log, its addresses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.config import compose
from megarl.config.bounds import annotations_of, bound_of
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.processes.machine import group_members
from megarl.engines.client.control import SLEEPING, EngineControl
from megarl.engines.client.names import JobAddresses, last_lines
from megarl.run.nodes.plan import NodeInfo, plan_job
from megarl.run.supervise.process_specs import Addresses, engine_process, specs
from megarl.tasks.image_rows import MAX_IMAGES


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_context_and_batch_of_an_engine() -> None:
    rollout = RolloutConfig(max_prompt_tokens=9000, max_response_tokens=500, num_threads=3, max_num_seqs=17)
    argv, environment = engine_process("dir/model", rollout, ModelConfig(dtype="bfloat16"), "127.0.0.1", 8100)
    assert option(argv, "--max-model-len") == "9500"
    assert int(option(argv, "--max-num-batched-tokens")) >= 9500, "without chunked prefill a prompt must fit one batch"
    assert "--no-enable-chunked-prefill" in argv
    assert option(argv, "--dtype") == "bfloat16"
    assert option(argv, "--port") == "8100"
    assert option(argv, "--logprobs-mode") == "processed_logprobs"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert not any("KEY" in name for name in environment), "the supervisor gives the key, not the command"


@pytest.mark.parametrize(("tp", "device", "alone"), [(1, "cpu", True), (2, "cpu", False), (1, "cuda", False)])
def test_one_process_fewer_only_on_one_cpu_rank(tp: int, device: str, alone: bool) -> None:
    argv, environment = engine_process(
        "m", RolloutConfig(max_prompt_tokens=128, tp=tp), ModelConfig(), "127.0.0.1", 1, device
    )  # type: ignore[arg-type]
    assert ("--distributed-executor-backend" in argv) == alone
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in environment) == alone
    assert ("--enforce-eager" in argv) == ("--no-enable-chunked-prefill" in argv) == (device == "cpu")
    assert ("--moe-backend" in argv) == (device == "cuda")


def test_engines_on_gpus_share_them_and_are_eager_where_that_is_asked_for() -> None:
    for eager in (False, True):
        rollout = RolloutConfig(max_prompt_tokens=128, enforce_eager=eager)
        argv, _ = engine_process("m", rollout, ModelConfig(), "127.0.0.1", 1, "cuda")
        assert argv.count("--enforce-eager") == eager and option(argv, "--gpu-memory-utilization") == "0.01"


def test_bytes_or_a_share_of_the_gpu_decide_the_cache() -> None:
    def argv_of(**settings: Any) -> list[str]:
        rollout = RolloutConfig(max_prompt_tokens=128, **settings)
        return engine_process("m", rollout, ModelConfig(), "127.0.0.1", 1, "cuda")[0]

    usual, given, share = argv_of(), argv_of(kv_cache_bytes=2**30), argv_of(gpu_memory_utilization=0.85)
    assert option(usual, "--kv-cache-memory-bytes") == str(2**28)
    assert option(given, "--kv-cache-memory-bytes") == str(2**30)
    assert "--kv-cache-memory-bytes" not in share and option(share, "--gpu-memory-utilization") == "0.85"
    assert "--kv-cache-dtype" not in usual and option(argv_of(kv_cache_dtype="fp8"), "--kv-cache-dtype") == "fp8"
    assert "--quantization" not in usual and "--quantization-config" not in usual


@pytest.mark.parametrize(
    ("layer", "in_eight_bits"),
    [
        ("model.layers.0.self_attn.qkv_proj", True), ("model.layers.0.self_attn.o_proj", True),
        ("model.layers.0.self_attn.q_b_proj", True), ("model.layers.0.self_attn.fused_qkv_a_proj", False),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", False), ("model.layers.0.self_attn.kv_b_proj", False),
        ("model.layers.0.mlp.gate_up_proj", True), ("model.layers.0.mlp.shared_experts.down_proj", True),
        ("model.layers.0.mlp.gate", False), ("model.layers.0.block_sparse_moe.gate", False),
        ("visual.blocks.0.attn.qkv", False),
    ],
)  # fmt: skip
def test_layers_in_eight_bits_are_chosen_by_vllms_own_rule(layer: str, in_eight_bits: bool) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    rollout = RolloutConfig(max_prompt_tokens=128, weight_dtype="fp8")
    argv, _ = engine_process("m", rollout, ModelConfig(dtype="bfloat16"), "127.0.0.1", 1, "cuda")
    given = json.loads(option(argv, "--quantization-config"))
    assert option(argv, "--quantization") == "online"
    assert (given["linear"], given["moe"]) == ("fp8_per_channel", "fp8_per_block")
    fused = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    }
    assert should_ignore_layer(layer, given["ignore"], fused, use_fnmatch=True) is not in_eight_bits


def test_temperatures_are_those_that_vllm_samples_with() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    bound = bound_of(annotations_of(RolloutConfig, bounds=True)["temperature"])
    assert bound is not None
    for end in (bound.low, bound.high):
        assert SamplingParams(temperature=end).temperature == end
    assert SamplingParams(temperature=bound.low / 2).temperature == bound.low, "which the trainer would not know"
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=bound.high + 0.1)


def test_further_options_are_written_as_vllm_reads_them() -> None:
    """tests/loop/test_engine.py has an engine with some."""
    options = {"async_scheduling": False, "enable_dbo": True, "stream_interval": 4, "a": ["b", 1], "c": {"d": None}}
    rollout = RolloutConfig(max_prompt_tokens=128, engine_options=options)
    argv, _ = engine_process("m", rollout, ModelConfig(), "127.0.0.1", 1)
    ours = ["--no-async-scheduling", "--enable-dbo", "--stream-interval", "4", "--a", "b", "1", "--c", '{"d": null}']
    assert argv[-len(ours) :] == ours


@pytest.mark.parametrize(
    ("model", "pp", "compilation"),
    [
        ({}, 1, None),
        ({"kv_lora_rank": 512}, 1, {"custom_ops": ["-rotary_embedding"]}),
        ({"conv_L_cache": 3}, 1, {"custom_ops": ["-rotary_embedding"]}),
        ({}, 2, {"mode": 1, "custom_ops": ["all"]}),
        ({"kv_lora_rank": 512}, 2, {"mode": 1, "custom_ops": ["all", "-rotary_embedding"]}),
    ],
)
def test_what_vllm_on_cpu_must_be_told(
    tmp_path: Path, model: dict[str, int], pp: int, compilation: dict[str, object] | None
) -> None:
    """tests/loop/test_sync_families.py shows what for."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    argv, _ = engine_process(str(tmp_path), RolloutConfig(max_prompt_tokens=128, pp=pp), ModelConfig(), "127.0.0.1", 1)
    assert option(argv, "--pipeline-parallel-size") == str(pp)
    assert ("--enforce-eager" in argv) == (pp == 1)
    assert ("--no-enable-prefix-caching" in argv) == ("conv_L_cache" in model)
    assert ("--distributed-executor-backend" in argv) == (pp == 1)
    assert ("--attention-backend" in argv) == ("kv_lora_rank" in model)
    found = json.loads(option(argv, "--compilation-config")) if "--compilation-config" in argv else None
    assert found == compilation


@pytest.mark.parametrize(
    ("device", "dtype", "told"), [("cuda", "float32", True), ("cuda", "bfloat16", False), ("cpu", "float32", False)]
)
def test_float32_on_gpus_is_no_tf32(device: str, dtype: str, told: bool) -> None:
    model = ModelConfig(dtype=dtype)  # type: ignore[arg-type]
    _, environment = engine_process("m", RolloutConfig(max_prompt_tokens=128), model, "127.0.0.1", 1, device)  # type: ignore[arg-type]
    found = {name: environment.get(name) for name in ("TRITON_F32_DEFAULT", "NVIDIA_TF32_OVERRIDE")}
    assert found == ({"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0"} if told else dict.fromkeys(found))


def test_a_float32_head_is_asked_for() -> None:
    rollout = RolloutConfig(max_prompt_tokens=8)
    usual, _ = engine_process("m", rollout, ModelConfig(dtype="bfloat16"), "127.0.0.1", 1)
    argv, _ = engine_process("m", rollout, ModelConfig(dtype="bfloat16", head_dtype="float32"), "127.0.0.1", 1)
    assert "--hf-overrides" not in usual
    assert argv[argv.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'


def test_priorities_are_asked_for_where_requests_are_kept() -> None:
    usual, _ = engine_process("m", RolloutConfig(max_prompt_tokens=8), ModelConfig(), "127.0.0.1", 1)
    argv, _ = engine_process("m", RolloutConfig(max_prompt_tokens=8), ModelConfig(), "127.0.0.1", 1, pause="keep")
    assert "--scheduling-policy" not in usual and option(argv, "--scheduling-policy") == "priority"


def test_expert_parallelism_is_asked_for() -> None:
    for wanted in (True, False):
        argv, _ = engine_process(
            "m", RolloutConfig(max_prompt_tokens=128, tp=2, expert_parallel=wanted), ModelConfig(), "127.0.0.1", 1
        )
        assert ("--enable-expert-parallel" in argv) == wanted


def test_a_model_that_takes_images_has_a_whole_tower_and_the_limits_of_pixels(tmp_path: Path) -> None:
    """tests/loop/test_vision.py has the tokens and log-probs."""

    def argv_of(model: ModelConfig) -> list[str]:
        return engine_process(str(tmp_path), RolloutConfig(max_prompt_tokens=8), model, "127.0.0.1", 1)[0]

    (tmp_path / "config.json").write_text("{}")
    assert not any(word.startswith(("--mm", "--limit-mm")) for word in argv_of(ModelConfig(max_image_pixels=5000)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    usual = argv_of(ModelConfig())
    assert json.loads(option(usual, "--limit-mm-per-prompt")) == {"image": MAX_IMAGES, "video": 0}
    assert option(usual, "--mm-encoder-tp-mode") == "data" and "--mm-processor-kwargs" not in usual
    limited = json.loads(option(argv_of(ModelConfig(max_image_pixels=5000)), "--mm-processor-kwargs"))
    assert limited == {"size": {"shortest_edge": 3136, "longest_edge": 5000}}, "vLLM takes both or none"


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert "no log" in last_lines(log)
    log.write_bytes(b"".join(b"line %d\n\n" % i for i in range(20000)) + b"\xff bad byte\n")
    assert last_lines(log, count=3) == "line 19998\nline 19999\n\ufffd bad byte"
    assert last_lines(log, count=10**6, limit=20).splitlines()[-1] == "\ufffd bad byte"


def test_members_of_a_process_group() -> None:
    assert os.getpid() in group_members(os.getpgid(0))
    assert group_members(2**22 + 1) == []


def test_addresses_come_from_the_environment() -> None:
    environment = {"MEGARL_LINK": "127.0.0.1:83", "MEGARL_JOB_KEY": "k"}
    expected = JobAddresses("127.0.0.1", 83, "k")
    assert JobAddresses.from_environment(environment) == expected
    del environment["MEGARL_LINK"]
    with pytest.raises(ConfigError, match="MEGARL_LINK"):
        JobAddresses.from_environment(environment)


@pytest.mark.parametrize(
    ("backend", "placement", "offload", "asked"),
    [
        ("nccl", "colocated", "sleep", "--enable-sleep-mode"),
        ("nccl", "colocated", "memory", "--enable-sleep-mode"),
        ("nccl", "colocated", "destroy", "--load-format"),
        ("nccl", "separate", "sleep", None),
        ("gloo", "colocated", "sleep", None),
        ("gloo", "colocated", "destroy", "--load-format"),
        ("gloo", "separate", "destroy", None),
    ],
)
def test_an_engine_is_told_how_it_leaves(backend: str, placement: str, offload: str, asked: str | None) -> None:
    """On a CPU vLLM's sleep is not used; one that ends reads no weights when it starts."""
    settings = (f"parallel.backend={backend}", f"rollout.placement={placement}", f"rollout.offload={offload}")
    config = compose(["experiment=quickstart", "parallel.tp=1", "rollout.replicas=1", *settings])
    plan = plan_job(config, [NodeInfo(0, "a", "all", 3)])
    assert plan.takes_turns is (placement == "colocated")
    found = specs(config, plan, Addresses("h:1", "h:2", ("h:3",), ("",), ()), {}, Path("logs"))
    [argv] = [spec.argv for _, spec in found if kind_of(spec.name) is ProcessKind.ENGINE]
    assert {"--enable-sleep-mode", "--load-format"}.intersection(argv) == ({asked} if asked else set())


def test_an_engine_refuses_and_is_idle_before_its_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def call(self: EngineControl, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        calls.append((path, body))
        return {"success": True, "results": [{"freed": 1, "rss": 2}]}

    monkeypatch.setattr(EngineControl, "call", call)
    engine = EngineControl("http://127.0.0.1:1", "k")
    assert engine.sleep() == [{"freed": 1, "rss": 2}]
    assert calls == [
        ("/megarl/refuse", {"reason": SLEEPING, "version": None}),
        ("/pause?mode=abort", None),
        ("/reset_prefix_cache", None),
        ("/megarl/asleep", {"asleep": True}),
        ("/collective_rpc", {"method": "megarl_sleep", "args": [False]}),
    ]
    calls.clear()
    engine.wake("weights")
    engine.wake("kv_cache")
    assert [body for _, body in calls] == [
        {"method": "megarl_wake", "args": ["weights"]},
        {"method": "megarl_wake", "args": ["kv_cache"]},
        {"asleep": False},
    ]


def test_engines_record_experts_where_that_is_asked_for() -> None:
    for device, variable in (("cpu", "MEGARL_CPU_ROUTING"), ("cuda", "VLLM_USE_V2_MODEL_RUNNER")):
        for replay in (False, True):
            rollout = RolloutConfig(max_prompt_tokens=8, routing_replay=replay)
            argv, environment = engine_process("m", rollout, ModelConfig(), "127.0.0.1", 1, device)  # type: ignore[arg-type]
            assert ("--enable-return-routed-experts" in argv) == (variable in environment) == replay
