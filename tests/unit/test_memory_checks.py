"""Bytes of residents against numbers by hand, and who shares a device with whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from megarl.config.algorithms import KLConfig, PPOConfig
from megarl.config.schema import (
    Config,
    CriticConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardModelConfig,
    RolloutConfig,
)
from megarl.core.errors import ConfigError
from megarl.learn import algorithms
from megarl.learn.memory.ledger import Ledger
from megarl.learn.memory.phases import PhasePlan
from megarl.learn.memory.resident_bytes import model_bytes
from megarl.run.checks.memory import device_bytes, engine_bytes, resident_bytes
from tests.parallel.families import FAMILIES

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EMBEDDING = 256 * 64  # 200 rows, padded to 64
NORMS = 2 * 64 + 2 * 16
LAYER = (64 + 2 * 32) * 64 + 64 * 64 + 2 * 96 * 64 + 96 * 64 + NORMS
MATRICES = ((128, 64), (64, 64), (192, 64), (64, 96))  # of a layer in an engine
WHOLE = EMBEDDING + 2 * LAYER + 64


def test_a_frozen_model_has_its_parameters_and_a_trained_one_padding_besides() -> None:
    settings = ModelConfig(dtype="bfloat16")
    assert model_bytes(TINY, settings, ParallelConfig(), "lm", trained=False) == [{"parameters": 2 * WHOLE}]
    gaps = 2 * 2 * 48  # q_norm and k_norm of each layer have 16 of 64 elements
    padded = -(-(WHOLE + gaps) // 128) * 128
    assert model_bytes(TINY, settings, ParallelConfig(), "lm", trained=True) == [
        {"parameters": 2 * padded, "gradients": 4 * padded, "optimizer": 12 * WHOLE}
    ]
    in_float32 = model_bytes(TINY, ModelConfig(), ParallelConfig(), "lm", trained=True)
    assert in_float32 == [{"parameters": 4 * padded, "gradients": 4 * padded, "optimizer": 8 * WHOLE}]


def test_data_parallel_ranks_share_an_optimizer() -> None:
    ranks = model_bytes(TINY, ModelConfig(), ParallelConfig(dp=3), "score", trained=True)
    scored = WHOLE + 64
    assert sum(rank["optimizer"] for rank in ranks) == 8 * scored
    assert len({rank["parameters"] for rank in ranks}) == 1 and ranks[0]["parameters"] % (4 * 3 * 128) == 0


@pytest.mark.parametrize(("backend", "copies"), [("gloo", 2), ("nccl", 1)])
def test_an_engine_has_its_weights_and_cache(backend: Any, copies: int) -> None:
    config = Config(
        model=ModelConfig(dtype="bfloat16"),
        parallel=ParallelConfig(backend=backend),
        rollout=RolloutConfig(replicas=2, kv_cache_bytes=2**20),
    )
    each = {"engine.weights": 2 * (WHOLE + (copies - 1) * EMBEDDING), "engine.kv_cache": 2**20}
    assert engine_bytes(config, TINY) == [each, each]
    halves = engine_bytes(replace(config, rollout=RolloutConfig(tp=2)), TINY)
    cut = (copies * EMBEDDING + 2 * (LAYER - NORMS)) // 2
    assert [worker["engine.weights"] for worker in halves] == [2 * (cut + 2 * NORMS + 64)] * 2
    eight_bits = engine_bytes(replace(config, rollout=replace(config.rollout, weight_dtype="fp8")), TINY)
    saved = 2 * sum(rows * columns - 4 * rows for rows, columns in MATRICES)
    assert [worker["engine.weights"] for worker in eight_bits] == [each["engine.weights"] - saved] * 2


def test_stages_of_an_engine_have_the_ends_that_vllm_gives_them() -> None:
    config = Config(rollout=RolloutConfig(pp=2))
    first, last = engine_bytes(config, TINY)
    assert first["engine.weights"] == 4 * (EMBEDDING + LAYER)
    assert last["engine.weights"] == 4 * (2 * EMBEDDING + LAYER + 64)
    on_gpus = engine_bytes(replace(config, parallel=ParallelConfig(backend="nccl")), TINY)
    assert on_gpus[1]["engine.weights"] == 4 * (EMBEDDING + LAYER + 64)


def test_experts_keep_their_router_in_float32_in_an_engine_and_out_of_the_residents() -> None:
    model_type, sizes = FAMILIES["deepseek_v3"]
    moe = AutoConfig.for_model(model_type, **sizes).to_dict()
    config = Config(model=ModelConfig(dtype="bfloat16"))
    (worker,) = engine_bytes(config, moe)
    (frozen,) = model_bytes(moe, config.model, config.parallel, "lm", trained=False)
    assert worker["engine.weights"] - frozen["parameters"] == 3 * 8 * 4  # layers, experts, bytes


def test_every_role_has_its_grid_dtype_and_model() -> None:
    small = {**TINY, "num_hidden_layers": 1}
    config = Config(
        model=ModelConfig(dtype="bfloat16"),
        parallel=ParallelConfig(tp=2),
        reference=ReferenceConfig(parallel=ParallelConfig(dp=2), dtype="float32"),
        critic=CriticConfig(parallel=ParallelConfig(pp=2)),
        reward_model=RewardModelConfig(path="scores", parallel=ParallelConfig(dp=2)),
        algorithm=PPOConfig(name="ppo", kl=KLConfig(coef=0.1)),
    )
    first, last = resident_bytes(config, algorithms.get("ppo"), {"actor": TINY, "reward_model": small})
    assert first["reference.parameters"] == last["reference.parameters"] == 4 * WHOLE
    assert first["reward_model.parameters"] == 2 * (EMBEDDING + LAYER + 64 + 64)
    assert first["critic.optimizer"] == 12 * (EMBEDDING + LAYER)
    assert last["critic.optimizer"] == 12 * (LAYER + 64 + 64)
    cut = (EMBEDDING + 2 * (LAYER - NORMS)) // 2
    assert first["actor.optimizer"] == 12 * (cut + 2 * NORMS + 64)
    assert len(first) == 8
    with pytest.raises(ConfigError, match=r"critic\.parallel\.pp=3"):
        wrong = replace(config, critic=CriticConfig(parallel=ParallelConfig(pp=3)))
        resident_bytes(wrong, algorithms.get("ppo"), {"actor": TINY, "reward_model": small})
    alone = resident_bytes(replace(config, reward_model=RewardModelConfig()), algorithms.get("sft"), {"actor": TINY})
    assert set(alone[0]) == {"actor.parameters", "actor.gradients", "actor.optimizer"}
    scoring = resident_bytes(
        replace(config, reward_model=RewardModelConfig()), algorithms.get("reward_model"), {"actor": TINY}
    )
    assert scoring[0]["actor.optimizer"] == first["actor.optimizer"] + 12 * 64


def test_ranks_and_workers_share_devices() -> None:
    ranks = [{"actor.parameters": 1}, {"actor.parameters": 2}]
    workers = [{"engine.weights": 3, "engine.kv_cache": 4}]
    assert device_bytes(ranks, workers) == [{**ranks[0], **workers[0]}, ranks[1]]
    assert device_bytes(ranks[:1], workers * 2) == [{**ranks[0], **workers[0]}, workers[0]]
    larger = {"engine.weights": 1, "engine.kv_cache": 9}
    assert device_bytes(ranks, [*workers, larger], nodes=2)[0] == {
        "actor.parameters": 1,
        "engine.weights": 3,
        "engine.kv_cache": 9,
    }
    assert device_bytes(ranks, [], nodes=2) == ranks
    assert Ledger(PhasePlan.of(Config()), device_bytes(ranks, workers), colocated=True).largest().total == 8
