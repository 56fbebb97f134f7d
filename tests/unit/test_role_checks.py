"""What is said of a job's roles before anything starts."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ArchitectureError, CheckpointError, ConfigError
from megarl.run.checks import job as checks
from tests.unit.small_job import config_of, refused


@pytest.fixture(scope="module")
def scores(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model for the prepared job, as transformers makes it, with the actor's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    path = tmp_path_factory.mktemp("scores") / "model"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    shutil.copy(prepared / "model" / "tokenizer.json", path)
    return path


def with_tokens(scores: Path, folder: Path, shift: int) -> Path:
    """The reward model with the ids of all ordinary tokens moved on."""
    shutil.copytree(scores, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ordinary = [token for token in vocabulary if token not in special]
    ids = [vocabulary[token] for token in ordinary]
    vocabulary.update(zip(ordinary, ids[shift:] + ids[:shift], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_roles_that_fit(prepared: Path, scores: Path) -> None:
    checks.check(config_of(prepared, "algorithm=ppo", f"reward_model.path={scores}", f"critic.path={scores}"))


def test_another_tokenizer_is_refused_though_its_size_is_the_same(prepared: Path, scores: Path, tmp_path: Path) -> None:
    other = with_tokens(scores, tmp_path / "other", 1)
    refused(
        ConfigError,
        config_of(prepared, f"reward_model.path={other}"),
        f"reward_model.path={other}",
        "the actor's token",
        "same tokenizer",
    )


def test_without_a_tokenizer_it_is_said_that_nothing_was_compared(
    prepared: Path, scores: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Path(shutil.copytree(scores, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        checks.check(config_of(prepared, f"reward_model.path={bare}"))
    assert f"reward_model.path={bare}: no tokenizer.json" in caplog.text


def test_a_role_is_named_by_its_own_settings(prepared: Path, scores: Path) -> None:
    ppo = ("algorithm=ppo", f"critic.path={scores}")
    refused(ConfigError, config_of(prepared, *ppo, "critic.parallel={pp: 2, vpp: 2}"), "critic.parallel.vpp=2")
    with pytest.raises((ConfigError, ArchitectureError), match=r"critic\.parallel\.tp=4"):
        checks.check(config_of(prepared, "parallel=tp2pp2", *ppo, "critic.parallel={tp: 4}"))
    refused(CheckpointError, config_of(prepared, "algorithm=ppo", "critic.path=/nonexistent"), "set critic.path to")
    missing = "reward_model.path: /nonexistent has no config.json; set reward_model.path to"
    refused(CheckpointError, config_of(prepared, "reward_model.path=/nonexistent"), missing)
    uneven = config_of(prepared, *ppo, "parallel.dp=3", "critic.parallel={pp: 3, dp: 2}")
    refused(
        ConfigError,
        uneven,
        "critic.parallel.pp=3 does not",
        "set critic.parallel.pp",
        "(critic.parallel.first_stage_layers,",
    )
    refused(
        ConfigError,
        config_of(prepared, "algorithm=ppo", "critic.optimizer.decay_steps=10"),
        "critic.optimizer.decay_steps=10",
    )


def test_a_grid_of_a_role_that_is_not_there_does_not_matter(prepared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        checks.check(config_of(prepared, "critic.parallel={tp: 3}", "critic.warmup_steps=5"))
    assert "critic.*: this job has no critic; these settings do nothing" in caplog.text


def test_what_has_a_reference() -> None:
    from megarl.learn import algorithms
    from megarl.learn.parallel.grid import roles_of

    config = config_of(Path("run"))
    assert roles_of(config, algorithms.get("ppo")) == ["reference", "critic"]
    assert roles_of(config_of(Path("run"), "algorithm.kl.coef=0"), algorithms.get("ppo")) == ["critic"]
    assert AlgorithmConfig().kl.coef > 0 and roles_of(config, algorithms.get("sft")) == []


def test_a_streamed_optimizer_must_be_one_that_leaves(prepared: Path) -> None:
    size = "trainer.stream_optimizer_bytes=1000"
    for more in ((), ("critic.offload=memory",)):
        refused(ConfigError, config_of(prepared, size, *more), size, "set trainer.offload to memory or disk")
    resets = config_of(prepared, size, "trainer.offload=memory", "algorithm.name=kimi_mirror_descent")
    refused(ConfigError, resets, "algorithm.name=kimi_mirror_descent, which resets the moments", "to null")
    checks.check(config_of(prepared, size, "trainer.offload=disk"))
