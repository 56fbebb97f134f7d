"""Settings of adapters that cannot work are refused before any process is launched."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.lora import LoraConfig
from megarl.core.errors import ConfigError
from megarl.learn import algorithms
from megarl.learn.memory.phases import Phase
from megarl.run.checks import job as checks
from megarl.run.checks.lora import check_adapters, check_tower_overlap
from megarl.run.checks.memory import ledger_of
from megarl.weights.checkpoint.formats.hf import read_hf_config
from tests.parallel.families import save
from tests.unit.small_job import config_of
from tests.unit.test_memory_checks import TINY, WHOLE

RANK = "model.lora.rank=8"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.router.bias_update_rate=0.1"], ["model.router.bias_update_rate=0.1", "set it to 0"]),
        (["model.train_vision_tower=true"], ["model.train_vision_tower=true", "model.lora.targets"]),
        (["reference.refresh=5"], ["reference.refresh=5", "set it to never"]),
        (["reference.parallel={dp: 2}"], ["reference.parallel", "leave it out"]),
        (["reference.dtype=bfloat16"], ["reference.dtype=bfloat16", "model.dtype=float32", "leave it out"]),
        (["reference.offload=memory"], ["reference.offload=memory", "trainer.offload"]),
        (["evaluation.average=0.9"], ["evaluation.average=0.9", "leave it out"]),
        (["model.lora.targets=[]"], ["model.lora.targets=[]", "all-linear"]),
        (["model.lora.rank_pattern={q_proj: 0}"], ["model.lora.rank_pattern.q_proj=0", "leave the layer out"]),
        (["model.lora.targets=[q_prj]"], ["model.lora.targets", "'q_prj'", "q_proj"]),
        (["model.lora.modules_to_save=[nrm]"], ["model.lora.modules_to_save", "'nrm'"]),
        (["model.lora.rank_pattern={q_prj: 2}"], ["model.lora.rank_pattern", "'q_prj'", "q_proj"]),
        (["model.lora.rank=33"], ["model.lora.rank=33", "smaller side", "lower it to 32 or less"]),
        (["model.lora.rank_pattern={o_proj: 99}"], ["model.lora.rank_pattern.o_proj=99", "lower it to 32 or less"]),
    ],
)
def test_setting_that_cannot_work_with_adapters(prepared: Path, overrides: list[str], words: list[str]) -> None:
    rank = [] if any("lora.rank=" in override for override in overrides) else [RANK]
    with pytest.raises(ConfigError) as raised:
        checks.check(config_of(prepared, *rank, *overrides))
    assert type(raised.value) is ConfigError
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def test_transformer_engine_hides_the_inputs_of_adapters(prepared: Path) -> None:
    config = config_of(prepared, RANK, "model.transformer_impl=transformer_engine", "parallel.backend=nccl")
    with pytest.raises(ConfigError, match=r"transformer_impl=transformer_engine with model\.lora\.rank=8: .*to local"):
        checks.check(config, elsewhere=True)


def test_adapters_that_work(prepared: Path, caplog: pytest.LogCaptureFixture) -> None:
    checks.check(config_of(prepared, RANK, "algorithm=ppo", "model.lora.modules_to_save=[norm]"))
    assert "model.lora" not in caplog.text
    with caplog.at_level(logging.WARNING):
        checks.check(config_of(prepared, "model.lora.alpha=8"))
    assert "model.lora.rank=0 trains the model itself" in caplog.text


def test_engines_keep_weights_that_stay_valid(prepared: Path) -> None:
    asleep = ("rollout.placement=colocated", "rollout.offload=memory")
    checks.check(config_of(prepared, RANK, *asleep))
    with pytest.raises(ConfigError, match=r"rollout\.offload=memory with model\.lora\.rank=0: .*; set it to sleep"):
        checks.check(config_of(prepared, *asleep))


def test_layers_that_a_model_does_not_have(tmp_path: Path) -> None:
    tied = read_hf_config(save("qwen3", tmp_path / "tied", tie_word_embeddings=True))
    untied = read_hf_config(save("qwen3", tmp_path / "untied"))
    head = LoraConfig(rank=4, targets=["lm_head"])
    check_adapters(head, untied, "/m")
    check_adapters(replace(head, targets=["embed_tokens"]), untied, "/m")
    refused = {
        r"targets has lm_head, but the model in /m .*tie_word_embeddings": (head, tied),
        r"targets has embed_tokens, but the model in /m .*tie_word_embeddings.*leave it out": (
            replace(head, targets=["embed_tokens"]),
            tied,
        ),
        r"modules_to_save has lm_head, but": (LoraConfig(rank=4, modules_to_save=["lm_head"]), tied),
        r"both name lm_head of the model in /m": (replace(head, modules_to_save=["lm_head"]), untied),
        r"alpha_pattern has 'k_proj', whose layers .*\['lm_head'\]": (
            replace(head, alpha_pattern={"k_proj": 2.0}),
            untied,
        ),
    }
    for words, (lora, hf_config) in refused.items():
        with pytest.raises(ConfigError, match=words):
            check_adapters(lora, hf_config, "/m")
    with pytest.raises(ConfigError, match="'lm_head', which is no linear layer"):
        check_adapters(head, untied, "/m", "score")


def test_overlap_waits_for_no_tower(tmp_path: Path) -> None:
    """A micro-batch without images has no gradient of its adapters."""
    save("qwen2_5_vl", tmp_path)
    hf_config, overlap = read_hf_config(tmp_path), ("parallel=dp2", "parallel.overlap_grad_reduce=true")
    check_tower_overlap(config_of(tmp_path, RANK, *overlap), hf_config)
    for setting in ("model.lora.targets=[attn.qkv]", "model.lora.modules_to_save=[visual.merger]"):
        check_tower_overlap(config_of(tmp_path, RANK, setting), hf_config)
        with pytest.raises(ConfigError, match=r"overlap_grad_reduce=true, and model\.lora trains visual\."):
            check_tower_overlap(config_of(tmp_path, RANK, setting, *overlap), hf_config)


def test_a_job_with_adapters_has_no_second_model_and_a_whole_warm_start() -> None:
    config = config_of(Path("x"), RANK, "parallel=tp1", "algorithm.kl.coef=0.1")
    assert config.trainer.warm_start.steps
    algorithm = algorithms.get(config.algorithm.name)
    ledger = ledger_of(config, algorithm, TINY)
    assert set(ledger.ranks[0]) == {"actor.parameters", "actor.gradients", "actor.optimizer"}
    layer = (64 + 64) + (64 + 32) * 2 + (64 + 64) + 3 * (64 + 96)
    assert ledger.ranks[0]["actor.optimizer"] == 2 * 4 * 8 * 2 * layer
    assert ledger.at(Phase.START, 0).device["actor.optimizer"] == 2 * 4 * WHOLE
    assert ledger.at(Phase.UPDATE, 0).total < ledger.largest().total and ledger.largest().phase is Phase.START
    without = replace(config, trainer=replace(config.trainer, warm_start=replace(config.trainer.warm_start, steps=0)))
    assert ledger_of(without, algorithm, TINY).largest().phase is not Phase.START
