"""Engines with adapters of their own (``sync.adapter=separate``): what they are started with, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megarl.config import Config
from megarl.config.job import SyncConfig
from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.core.errors import ConfigError
from megarl.engines.client.names import ADAPTERS, LORA_RANKS
from megarl.run.checks.engine_options import check_engine_options
from megarl.run.checks.lora import check_separate
from megarl.run.supervise.process_specs import engine_process
from tests.parallel.families import FAMILIES

ATTENTION = ["q_proj", "v_proj", "o_proj"]


def hf_config_of(family: str) -> dict[str, Any]:
    model_type, sizes = FAMILIES[family]
    return dict(AutoConfig.for_model(model_type, **sizes).to_dict())


def config_of(lora: LoraConfig, sync: SyncConfig | None = None, rollout: RolloutConfig | None = None) -> Config:
    config = replace(Config(), model=ModelConfig(lora=lora), sync=sync or SyncConfig(adapter="separate"))
    return config if rollout is None else replace(config, rollout=rollout)


@pytest.mark.parametrize(
    ("lora", "rank", "layers"),
    [
        (LoraConfig(rank=4), 8, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        (LoraConfig(rank=8, rank_pattern={"q_proj": 9}, targets=ATTENTION), 16, {"qkv_proj", "o_proj"}),
        (LoraConfig(rank=1, targets=["layers.0.mlp.up_proj"]), 1, {"gate_up_proj"}),
    ],
)
def test_an_engine_has_room_for_the_largest_adapter_in_the_layers_that_have_one(
    tmp_path: Path, lora: LoraConfig, rank: int, layers: set[str]
) -> None:
    model_type, sizes = FAMILIES["qwen3"]
    AutoConfig.for_model(model_type, **sizes).save_pretrained(tmp_path)
    rollout, path = RolloutConfig(max_prompt_tokens=8), str(tmp_path)
    argv, environment = engine_process(path, rollout, ModelConfig(lora=lora), "h", 1, adapter="separate")
    assert argv[argv.index("--max-lora-rank") + 1] == str(rank)
    at = argv.index("--lora-target-modules") + 1
    assert set(argv[at : at + len(layers)]) == layers and argv[at + len(layers)].startswith("--")
    assert argv[argv.index("--max-loras") + 1] == "1" and environment[ADAPTERS] == "1"
    for model, adapter in ((ModelConfig(lora=lora), "merged"), (ModelConfig(), "separate")):
        argv, environment = engine_process(path, rollout, model, "h", 1, adapter=adapter)  # type: ignore[arg-type]
        assert "--enable-lora" not in argv and ADAPTERS not in environment


def test_no_option_of_a_user_changes_the_adapters() -> None:
    for name in ("enable_lora", "max_lora_rank", "lora_target_modules", "fully_sharded_loras"):
        with pytest.raises(ConfigError, match="megarl compares them"):
            check_engine_options(replace(Config(), rollout=RolloutConfig(engine_options={name: 1})))


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("qwen3", LoraConfig(), r"model\.lora\.rank=0"),
        ("qwen3_moe", LoraConfig(rank=4, targets=ATTENTION), "computes experts by Triton, which CPUs do not have"),
        ("qwen3_moe", LoraConfig(rank=4), r"adapters of experts \(model\.layers\.\d+\.mlp\.experts\."),
        ("deepseek_v3", LoraConfig(rank=4, targets=["o_proj"]), "adapters of latent attention"),
        ("qwen3", LoraConfig(rank=4, targets=["q_proj", "lm_head"]), r"an adapter of the head \(lm_head"),
        ("qwen3", LoraConfig(rank=4, targets=["embed_tokens"]), r"an adapter of the embedding \(model\.embed.*=merged"),
        ("qwen3", LoraConfig(rank=4, modules_to_save=["norm"]), r"trained whole \(norm"),
        ("qwen3", LoraConfig(rank=LORA_RANKS[-1] + 1), "rank 513: vLLM has room for 512"),
    ],
)
def test_what_vllm_does_not_compute_apart_is_refused(family: str, lora: LoraConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_separate(config_of(lora), hf_config_of(family))
    check_separate(config_of(lora, SyncConfig()), hf_config_of(family))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama3", "gemma3_text", "glm4"])
def test_dense_models_are_computed_apart(family: str) -> None:
    check_separate(config_of(LoraConfig(rank=4)), hf_config_of(family))


@pytest.mark.parametrize(
    ("sync", "rollout", "words"),
    [
        (SyncConfig(adapter="separate", method="checkpoint"), RolloutConfig(), r"sync\.method=checkpoint"),
        (SyncConfig(adapter="separate", cold_interval=3), RolloutConfig(), r"sync\.cold_interval"),
        (SyncConfig(adapter="separate"), RolloutConfig(pp=2), r"rollout\.pp=2"),
        (SyncConfig(adapter="separate"), RolloutConfig(weight_dtype="fp8"), r"rollout\.weight_dtype=fp8"),
    ],
)
def test_settings_that_need_merged_weights_are_refused(sync: SyncConfig, rollout: RolloutConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.*set sync\.adapter=merged"):
        check_separate(config_of(LoraConfig(rank=4), sync, rollout), hf_config_of("qwen3"))
