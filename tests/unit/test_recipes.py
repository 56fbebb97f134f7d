"""The experiments for real models against their sources: every number is the source's or a listed departure.

``SOURCES`` holds the sources' values under megarl's names, copied by hand from the files at the named commits. A
setting without a value there is not in the table. ``OURS`` holds the departures with megarl's values; the experiment's
file explains each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.experience import verify
from megarl.config import Config, compose, config_dir
from megarl.core.schema import Reward, Trajectory
from tests.trajectories import one_turn

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "experiments.md").read_text()
GSM8K_MATH, ULTRAFEEDBACK, GEOMETRY3K = 14_973, 61_135, 2_101
"""Rows of the data sets' training splits."""

SAMPLING: dict[str, Any] = {"rollout.temperature": 1.0}
GRPO: dict[str, Any] = SAMPLING | {
    "algorithm.name": "grpo",
    "algorithm.importance": "token",
    "algorithm.normalize_by_std": True,
    "algorithm.entropy_coef": 0.0,
    "algorithm.correction": "none",
    "algorithm.clip_low": 0.2,
}
ADAM: dict[str, Any] = {
    "trainer.optimizer.lr": 1e-6,
    "trainer.optimizer.min_lr": None,
    "trainer.optimizer.decay_steps": None,
    "trainer.optimizer.warmup_steps": 0,
    "trainer.optimizer.beta1": 0.9,
    "trainer.optimizer.eps": 1e-8,
    "trainer.optimizer.clip_grad": 1.0,
}
VERL: dict[str, Any] = {  # verl/trainer/config, verl/workers/config/optimizer.py
    **GRPO,
    **ADAM,
    "algorithm.clip_high": 0.2,
    "algorithm.dual_clip": 3.0,
    "algorithm.aggregation": "token_mean",
    "algorithm.dynamic_sampling": False,
    "trainer.optimizer.beta2": 0.999,
    "trainer.optimizer.weight_decay": 0.01,
    "trainer.eval_interval": 5,
}
KL_LOSS: dict[str, Any] = {"algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "k3", "algorithm.kl.place": "loss"}

SOURCES: dict[str, dict[str, Any]] = {
    "volcengine/verl@b178a3cd56f5:examples/grpo_trainer/run_qwen2_5-7b_math_megatron_diff_tp.sh": {
        "experiment": "grpo_qwen2_5_7b",
        **VERL,
        **KL_LOSS,
        "algorithm.group_size": 5,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 1024,
        "trainer.steps": GSM8K_MATH // 1024 * 15,
        "trainer.tasks_per_step": 1024,
        "trainer.updates_per_step": 1024 // 256,
        "trainer.checkpoint_interval": 20,
    },
    "volcengine/verl@6e7fdc2e00d3:examples/grpo_trainer/run_qwen2_5_vl-7b-megatron.sh": {
        "experiment": "grpo_qwen2_5_vl_7b",
        **VERL,
        **KL_LOSS,
        "algorithm.kl.coef": 0.01,
        "algorithm.group_size": 5,
        "model.train_vision_tower": True,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 2048,
        "trainer.steps": "15 epochs of 2,101 rows",
        "trainer.tasks_per_step": 512,
        "trainer.updates_per_step": 512 // 128,
        "trainer.checkpoint_interval": 20,
        "trainer.max_tokens_per_micro_batch": 5120,
    },
    "volcengine/verl@6e7fdc2e00d3:examples/grpo_trainer/run_qwen3_vl-8b-megatron.sh": {
        "experiment": "grpo_qwen3_vl_8b",
        **VERL,
        **KL_LOSS,
        "algorithm.kl.coef": 0.01,
        "algorithm.group_size": 5,
        "model.recompute": "full",
        "model.train_vision_tower": True,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 2048,
        "trainer.steps": "15 epochs of 2,101 rows",
        "trainer.tasks_per_step": 512,
        "trainer.updates_per_step": 512 // 128,
        "trainer.checkpoint_interval": 20,
        "trainer.max_tokens_per_micro_batch": 4096,
    },
    "verl-project/verl@08aef7ff7419:examples/grpo_trainer/run_qwen3_5_27b_fsdp.sh": {
        "experiment": "grpo_qwen3_5_27b",
        **VERL,
        **KL_LOSS,
        "algorithm.kl.coef": 0.01,
        "algorithm.group_size": 5,
        "model.recompute": "full",
        "model.train_vision_tower": True,
        "rollout.tp": 4,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 2048,
        "trainer.steps": "15 epochs of 2,101 rows",
        "trainer.tasks_per_step": 64,
        "trainer.updates_per_step": 64 // 16,
        "trainer.checkpoint_interval": 5,
        "trainer.max_tokens_per_micro_batch": "one sequence",
    },
    "verl-project/verl@d9611d9f5c23:examples/grpo_trainer/run_qwen3_5-35b-megatron.sh": {
        "experiment": "grpo_qwen3_5_35b_a3b",
        **VERL,
        **KL_LOSS,
        "algorithm.kl.coef": 0.01,
        "algorithm.group_size": 5,
        "model.recompute": "full",
        "model.router.aux_loss_coef": 0.01,
        "model.router.z_loss_coef": 0.001,
        "model.train_vision_tower": True,
        "rollout.tp": 8,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 2048,
        "trainer.steps": "15 epochs of 2,101 rows",
        "trainer.tasks_per_step": 32,
        "trainer.updates_per_step": 1,
        "trainer.checkpoint_interval": 20,
        "trainer.max_tokens_per_micro_batch": 4096,
    },
    "volcengine/verl@b178a3cd56f5:examples/grpo_trainer/run_qwen3-8b_npu.sh": {
        "experiment": "grpo_qwen3_8b",
        **VERL,
        **KL_LOSS,
        "algorithm.group_size": 5,
        "rollout.max_prompt_tokens": 512,
        "rollout.max_response_tokens": 1024,
        "trainer.steps": "15 epochs of DAPO-Math-17k as published",
        "trainer.tasks_per_step": 256,
        "trainer.updates_per_step": 256 // 64,
        "trainer.checkpoint_interval": 5,
    },
    "volcengine/verl@b178a3cd56f5:examples/ppo_trainer/run_qwen2-7b_rm.sh": {
        "experiment": "ppo_llama3_1_8b",
        **VERL,
        "algorithm.name": "ppo",
        "algorithm.kl.coef": 0.0,
        "algorithm.group_size": 1,
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "algorithm.whiten_advantages": True,
        "algorithm.value_clip": 0.5,
        "critic.optimizer.lr": 1e-5,
        "critic.optimizer.beta2": 0.999,
        "critic.optimizer.weight_decay": 0.01,
        "critic.optimizer.warmup_steps": int(0.05 * 210),
        "critic.warmup_steps": 0,
        "critic.path": "the actor's",
        "reward.weight": 0.0,
        "reward_model.coef": 1.0,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 512,
        "trainer.steps": GSM8K_MATH // 1024 * 15,
        "trainer.tasks_per_step": 1024,
        "trainer.updates_per_step": 1024 // 256,
        "trainer.optimizer.warmup_steps": int(0.1 * 210),
        "trainer.checkpoint_interval": 20,
    },
    "volcengine/verl@4f80e465c2ec:recipe/dapo/run_dapo_qwen2.5_32b.sh": {
        "experiment": "grpo_qwen2_5_32b",
        **VERL,
        "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": 10.0,
        "algorithm.dynamic_sampling": True,
        "algorithm.max_extra_rollouts": 10 * 1536 // 512 - 1,
        "algorithm.group_size": 16,
        "algorithm.kl.coef": 0.0,
        "reward.overlong_buffer": 4096,
        "reward.overlong_penalty": 1.0,
        "rollout.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480,
        "trainer.steps": "1 epoch of DAPO-Math-17k as published",
        "trainer.tasks_per_step": 512,
        "trainer.updates_per_step": 512 // 32,
        "trainer.optimizer.warmup_steps": 10,
        "trainer.optimizer.weight_decay": 0.1,
        "trainer.checkpoint_interval": 5,
    },
    "THUDM/slime@624b824a898a:scripts/run-qwen3-30B-A3B.sh": {
        "experiment": "grpo_qwen3_30b_a3b",
        **GRPO,
        **ADAM,
        "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": None,
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.dynamic_sampling": False,
        "algorithm.group_size": 8,
        "algorithm.kl.coef": 0.0,
        "reward.overlong_buffer": None,
        "rollout.max_prompt_tokens": None,
        "rollout.max_response_tokens": 8192,
        "trainer.steps": 3000,
        "trainer.tasks_per_step": 32,
        "trainer.updates_per_step": 32 * 8 // 256,
        "trainer.max_tokens_per_micro_batch": 20480,
        "trainer.optimizer.beta2": 0.98,
        "trainer.optimizer.weight_decay": 0.1,
        "trainer.eval_interval": 20,
        "trainer.checkpoint_interval": 20,
    },
    "THUDM/slime@4a2812e9ea5b:scripts/run-qwen3-235B-A22B.sh": {
        "experiment": "gspo_qwen3_235b_a22b",
        **GRPO,
        **ADAM,
        "rollout.temperature": 0.8,
        "algorithm.name": "gspo",
        "algorithm.importance": "sequence_mean",
        "algorithm.clip_low": 4e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.dual_clip": None,
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.group_size": 8,
        "algorithm.kl.coef": 0.0,
        "rollout.max_prompt_tokens": None,
        "rollout.max_response_tokens": 8192,
        "evaluation.samples": 16,
        "evaluation.top_p": 0.7,
        "trainer.steps": 3000,
        "trainer.tasks_per_step": 8,
        "trainer.updates_per_step": 8 * 8 // 64,
        "trainer.max_tokens_per_micro_batch": 16384,
        "trainer.optimizer.beta2": 0.98,
        "trainer.optimizer.weight_decay": 0.1,
        "trainer.eval_interval": "none",
        "trainer.checkpoint_interval": 20,
    },
    "THUDM/slime@57f3c59bf435:scripts/run-glm4.5-355B-A32B.sh": {
        "experiment": "gspo_glm4_5_air",
        **GRPO,
        **ADAM,
        "rollout.temperature": 0.8,
        "algorithm.name": "gspo",
        "algorithm.importance": "sequence_mean",
        "algorithm.clip_low": 1e-4,
        "algorithm.clip_high": 2e-4,
        "algorithm.correction": "truncate",
        "algorithm.correction_cap": 2.0,
        "algorithm.dual_clip": None,
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.dynamic_sampling": True,
        "algorithm.group_size": 8,
        "algorithm.kl.coef": 0.0,
        "rollout.max_prompt_tokens": None,
        "rollout.max_response_tokens": 32768,
        "evaluation.samples": 8,
        "evaluation.top_p": 0.7,
        "trainer.steps": 3000,
        "trainer.tasks_per_step": 128,
        "trainer.updates_per_step": 4,
        "trainer.max_tokens_per_micro_batch": 16384,
        "trainer.optimizer.beta2": 0.98,
        "trainer.optimizer.weight_decay": 0.1,
        "trainer.eval_interval": 20,
        "trainer.checkpoint_interval": 20,
    },
    "THUDM/slime@66034ab772ab:scripts/run-gpt-oss-20B.sh": {
        "experiment": "grpo_gpt_oss_20b",
        **GRPO,
        **ADAM,
        "algorithm.clip_high": 0.2,
        "algorithm.dual_clip": None,
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.dynamic_sampling": False,
        "algorithm.group_size": 8,
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.place": "loss",
        "reward.overlong_buffer": None,
        "rollout.max_prompt_tokens": None,
        "rollout.max_response_tokens": 8192,
        "evaluation.samples": 16,
        "trainer.steps": 3000,
        "trainer.tasks_per_step": 32,
        "trainer.updates_per_step": 1,
        "trainer.max_tokens_per_micro_batch": 1536,
        "trainer.optimizer.lr": 5e-7,
        "trainer.optimizer.min_lr": 0.0,
        "trainer.optimizer.decay_steps": 3000,
        "trainer.optimizer.warmup_steps": int(0.01 * 3000),
        "trainer.optimizer.beta2": 0.99,
        "trainer.optimizer.weight_decay": 0.01,
        "trainer.eval_interval": 20,
        "trainer.checkpoint_interval": 20,
    },
    "allenai/open-instruct@0047e9447ffe:scripts/train/olmo3/7b_rlzero_math.sh": {
        "experiment": "grpo_olmo3_7b",
        **GRPO,
        **ADAM,
        "algorithm.normalize_by_std": False,
        "algorithm.clip_high": 0.272,
        "algorithm.correction": "truncate",
        "algorithm.correction_cap": 2.0,
        "algorithm.dual_clip": None,
        "algorithm.dynamic_sampling": True,
        "algorithm.overlong_filtering": True,
        "algorithm.group_size": 16,
        "algorithm.kl.coef": 0.0,
        "rollout.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 12000,
        "sync.max_staleness": 4,
        "sync.pause": "keep",
        "trainer.steps": 512_000 // (16 * 16),
        "trainer.tasks_per_step": 16,
        "trainer.updates_per_step": 1,
        "trainer.max_tokens_per_micro_batch": 32768,
        "trainer.optimizer.beta2": 0.999,
        "trainer.eval_interval": 100,
        "trainer.checkpoint_interval": 100,
    },
    "NVIDIA-NeMo/RL@17dc2c590ae5:examples/configs/recipes/llm/grpo-gemma3-27b-it-8n8g-fsdp2tp8-actckpt-long.yaml": {
        "experiment": "grpo_gemma3_12b",
        **GRPO,
        **ADAM,
        "algorithm.clip_high": 0.2,
        "algorithm.dual_clip": None,
        "algorithm.aggregation": "token_mean",
        "algorithm.dynamic_sampling": False,
        "algorithm.group_size": 32,
        "algorithm.kl.coef": 0.01,
        "algorithm.kl.estimator": "k3",
        "algorithm.kl.place": "loss",
        "rollout.max_prompt_tokens": "16,384 with the answer",
        "rollout.max_response_tokens": 16384,
        "trainer.steps": 20,
        "trainer.tasks_per_step": 64,
        "trainer.updates_per_step": 64 * 32 // 512,
        "trainer.optimizer.lr": 3e-7,
        "trainer.optimizer.beta2": 0.999,
        "trainer.optimizer.weight_decay": 0.01,
        "trainer.optimizer.warmup_steps": 50,
        "trainer.eval_interval": 10,
        "trainer.checkpoint_interval": 10,
    },
    "modelscope/Trinity-RFT@18960d4eea98:examples/mix_math/mix_math.yaml": {
        "experiment": "mix_qwen2_5_7b",
        **VERL,
        **KL_LOSS,
        "algorithm.name": "mix",
        "algorithm.kl.estimator": "k2",
        "algorithm.group_size": 8,
        "algorithm.mu": 0.1,
        "algorithm.expert_ratio": 0.25,
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 10240,
        "trainer.steps": GSM8K_MATH // 30,
        "trainer.tasks_per_step": round(40 * (1 - 0.25)),
        "trainer.updates_per_step": 1,
        "trainer.max_tokens_per_micro_batch": 25600,
        "trainer.eval_interval": 10,
        "trainer.checkpoint_interval": 50,
    },
    "OpenRLHF/OpenRLHF@3c3be6234e0c:examples/scripts/train_dpo_llama.sh": {
        "experiment": "dpo_llama3_1_8b",
        **ADAM,
        "algorithm.name": "dpo",
        "algorithm.preference": "sigmoid",
        "algorithm.beta": 0.1,
        "algorithm.label_smoothing": 0.0,
        "trainer.steps": ULTRAFEEDBACK // 256,
        "trainer.tasks_per_step": 256,
        "trainer.updates_per_step": 1,
        "trainer.max_tokens_per_micro_batch": "8,192 an answer",
        "trainer.optimizer.lr": 5e-7,
        "trainer.optimizer.min_lr": 5e-8,
        "trainer.optimizer.warmup_steps": 8,
        "trainer.optimizer.decay_steps": 238,
        "trainer.optimizer.beta2": 0.95,
        "trainer.optimizer.weight_decay": 0.0,
        "trainer.eval_interval": "at the end",
        "trainer.checkpoint_interval": "at the end",
    },
    "arXiv 2501.12948v2": {
        "experiment": "grpo_deepseek_v3",
        **SAMPLING,
        **KL_LOSS,
        "algorithm.name": "grpo",
        "algorithm.importance": "sequence_product",
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.normalize_by_std": True,
        "algorithm.clip_low": "not given",
        "algorithm.clip_high": "not given",
        "algorithm.dual_clip": None,
        "algorithm.group_size": 16,
        "reference.refresh": 400 // 16,
        "rollout.max_response_tokens": "32,768, then 65,536",
        "trainer.steps": 10_400 // 16,
        "trainer.tasks_per_step": 8192 // 16,
        "trainer.updates_per_step": 16,
        "trainer.optimizer.lr": 3e-6,
    },
}
OURS: dict[str, dict[str, Any]] = {
    "grpo_qwen2_5_7b": {},
    "grpo_qwen3_8b": {
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 8192,
        "trainer.steps": GSM8K_MATH // 256 * 15,
    },
    "grpo_qwen2_5_vl_7b": {"model.train_vision_tower": False, "trainer.steps": GEOMETRY3K // 512 * 15},
    "grpo_qwen3_vl_8b": {
        "model.recompute": "none",
        "model.train_vision_tower": False,
        "trainer.steps": GEOMETRY3K // 512 * 15,
    },
    "grpo_qwen3_5_27b": {
        "model.recompute": "selective",
        "model.train_vision_tower": False,
        "trainer.steps": GEOMETRY3K // 64 * 15,
        "trainer.max_tokens_per_micro_batch": 4096,
    },
    "grpo_qwen3_5_35b_a3b": {"model.train_vision_tower": False, "trainer.steps": GEOMETRY3K // 32 * 15},
    "ppo_llama3_1_8b": {"critic.path": "models/Llama-3.1-8B-RM"},
    "grpo_qwen2_5_32b": {"reward.overlong_penalty": 0.5, "trainer.steps": 300},
    "grpo_qwen3_30b_a3b": {"rollout.max_prompt_tokens": 2048},
    "gspo_qwen3_235b_a22b": {"rollout.max_prompt_tokens": 2048, "trainer.eval_interval": 20},
    "grpo_gemma3_12b": {
        "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 7168,
        "trainer.steps": GSM8K_MATH // 1024 * 15,
    },
    "grpo_gpt_oss_20b": {"rollout.max_prompt_tokens": 2048, "trainer.max_tokens_per_micro_batch": 10240},
    "grpo_olmo3_7b": {"trainer.max_tokens_per_micro_batch": 16384},
    "gspo_glm4_5_air": {"rollout.max_prompt_tokens": 2048, "trainer.max_tokens_per_micro_batch": 34816},
    "mix_qwen2_5_7b": {"trainer.max_tokens_per_micro_batch": 11264},
    "dpo_llama3_1_8b": {
        "trainer.max_tokens_per_micro_batch": 16384,
        "trainer.eval_interval": 50,
        "trainer.checkpoint_interval": 50,
    },
    "grpo_deepseek_v3": {"algorithm.clip_low": 10.0, "algorithm.clip_high": 10.0, "rollout.max_response_tokens": 32768},
}
EXPERIMENTS = {str(values["experiment"]): source for source, values in SOURCES.items()}


def value(config: Config, setting: str) -> Any:
    return reduce(getattr, setting.split("."), config)


def head(name: str) -> str:
    """The comment at the top of an experiment's file, as one line."""
    text = (config_dir() / "experiment" / f"{name}.yaml").read_text()
    return " ".join(line.removeprefix("#").strip() for line in text[: text.index("\ndefaults:")].splitlines())


def test_every_experiment_for_a_real_model_has_a_source() -> None:
    heads = {
        path.stem
        for path in (config_dir() / "experiment").glob("*.yaml")
        if "Never run on hardware" in path.read_text()
    }
    assert heads - {"own_gpu"} == set(EXPERIMENTS) == set(OURS), "own_gpu is for a model and rows of yours"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_numbers_are_the_sources(name: str) -> None:
    config, source, ours = compose([f"experiment={name}"]), SOURCES[EXPERIMENTS[name]], OURS[name]
    expected = {setting: ours.get(setting, there) for setting, there in source.items() if setting != "experiment"}
    assert {setting: value(config, setting) for setting in expected} == expected


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_departures_are_departures_and_listed(name: str) -> None:
    source = SOURCES[EXPERIMENTS[name]]
    for setting, here in OURS[name].items():
        assert source[setting] != here
        assert setting in head(name).partition("Departures:")[2]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_and_the_docs_name_the_source(name: str) -> None:
    assert f"Source: {EXPERIMENTS[name]}" in head(name)
    assert f"- `{name}`: `{EXPERIMENTS[name]}`" in " ".join(DOCS.split())


def answer(config: Config, length: int, score: float, index: int) -> Trajectory:
    end = "stop" if length < config.rollout.max_response_tokens else "length"
    return Trajectory(
        rollout_id="r",
        task_id="t",
        group_id="g",
        index=index,
        group_size=4,
        turns=one_turn([1], [2] * length, [-0.5] * length, finish_reason=end),
        reward=Reward(score, "ok" if score else "wrong"),
    )


def test_dapos_rewards_are_the_sources_on_another_scale() -> None:
    """There −1 or 1 and up to 1.0 less for length; here (r + 1) / 2, so the order and the advantages are the same."""
    config = compose(["experiment=grpo_qwen2_5_32b"])
    full = config.rollout.max_response_tokens
    there = {(1.0, full): 0.0, (1.0, full - 2048): 0.5, (0.0, 100): -1.0, (0.0, full): -2.0}
    group = [answer(config, length, score, index) for index, (score, length) in enumerate(there)]
    trajectories, *_ = verify(group, config.reward, vocab_size=4, max_response_tokens=full)
    scores = [trajectory.reward.score for trajectory in trajectories]
    assert scores == [(r + 1.0) / 2.0 for r in there.values()]
    right_but_long, _, wrong_but_short, _ = scores
    assert right_but_long > wrong_but_short
    stricter = replace(config.reward, overlong_penalty=1.0)
    again, *_ = verify(group, stricter, vocab_size=4, max_response_tokens=full)
    assert again[0].reward.score == again[2].reward.score, "what the source's penalty would do to scores of 0 and 1"
