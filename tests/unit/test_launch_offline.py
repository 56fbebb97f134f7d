"""An offline job needs no engines and no rewards; its rows must fit the model and a micro-batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.config import Config
from megarl.core.errors import CheckpointError, ConfigError, DataError
from megarl.core.schema import Preference, Task
from megarl.run.checks import job as checks
from megarl.run.launch.job import halved
from megarl.tasks import ChatTokenizer, encode_preferences, read_preferences, read_rows
from tests.unit.small_job import config_of, refused

KINDS = ("sft", "dpo", "reward_model")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories with what the check makes; no test changes them."""
    folders = {name: tmp_path_factory.mktemp(name) for name in KINDS}
    for name, folder in folders.items():
        assert checks.check(config_of(folder, f"algorithm.name={name}")) == {}, "the store has no tasks"
    return folders


def offline_config(folders: dict[str, Path], name: str, *overrides: str) -> Config:
    return config_of(folders[name], f"algorithm.name={name}", *overrides)


@pytest.mark.parametrize("name", KINDS)
def test_files_hold_what_the_algorithm_needs(offline: dict[str, Path], name: str) -> None:
    data = offline[name] / "data"
    for split, size in (("train", 30), ("eval", 10)):
        rows: list[Any] = [*(read_preferences if name != "sft" else read_rows)(data / f"{split}.parquet")]
        assert len(rows) == size
        assert all(isinstance(row, Task if name == "sft" else Preference) for row in rows)
        assert name != "sft" or all(row.response == row.ground_truth for row in rows)
    assert len(read_rows(data / "warm_start.parquet", require_response=True)) == 30


@pytest.mark.parametrize("name", KINDS)
def test_nothing_of_rollouts_is_asked(offline: dict[str, Path], name: str) -> None:
    """Settings that a job with engines is refused for."""
    config = offline_config(
        offline,
        name,
        "rollout.replicas=1000",
        "rollout.tp=3",
        "rollout.max_prompt_tokens=1000",
        "reward.path=/no/such/reward.py",
        "algorithm.group_size=1",
    )
    before = {path: path.stat().st_mtime_ns for path in offline[name].rglob("*")}
    checks.check(config)
    assert {path: path.stat().st_mtime_ns for path in offline[name].rglob("*")} == before


@pytest.mark.parametrize("name", KINDS)
def test_updates_are_counted_in_rows_of_the_file(offline: dict[str, Path], name: str) -> None:
    config = offline_config(offline, name, "trainer.tasks_per_step=4", "trainer.updates_per_step=5")
    refused(ConfigError, config, "trainer.updates_per_step=5", "4 rows of a step (trainer.tasks_per_step)")


def test_passes_over_a_rollout_need_rollouts(offline: dict[str, Path]) -> None:
    refused(
        ConfigError,
        offline_config(offline, "sft", "trainer.ppo_epochs=2"),
        "trainer.ppo_epochs=2 in an offline job",
        "trainer.steps",
    )


def test_rewards_cannot_train_on_preferences(offline: dict[str, Path]) -> None:
    config = config_of(offline["dpo"], "taskset.generate=null")
    refused(DataError, config, "train.parquet: column 'reward_model' is missing")


def with_row(folder: Path, path: Path, split: str, **changes: Any) -> str:
    """An override for a jsonl copy of a split's file in which row 3 differs."""
    rows = pq.read_table(folder / "data" / f"{split}.parquet", partitioning=None).to_pylist()
    rows[3] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"taskset.{split}={path}"


LONG = "1 2 3 4 " * 40


@pytest.mark.parametrize(
    ("name", "split", "changes", "words"),
    [
        ("sft", "train", {"response": LONG}, ["line 4 (taskset.train)", "the model's context is 128"]),
        ("dpo", "train", {"rejected": LONG}, ["line 4 (taskset.train)", "the model's context is 128"]),
        ("dpo", "eval", {"chosen": LONG}, ["line 4 (taskset.eval)", "the model's context is 128"]),
        (
            "reward_model",
            "warm_start",
            {"response": LONG},
            ["line 4 (taskset.warm_start)", "the model's context is 128"],
        ),
        ("sft", "eval", {"response": None}, ["line 4", "response must be a non-empty string"]),
        ("dpo", "train", {"rejected": ""}, ["line 4", "rejected must be a non-empty string"]),
        ("reward_model", "train", {"chosen": "é", "rejected": "è"}, ["line 4 (taskset.train)", "the same tokens"]),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(
    offline: dict[str, Path], tmp_path: Path, name: str, split: str, changes: dict[str, Any], words: list[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    refused(
        DataError, offline_config(offline, name, with_row(offline[name], path, split, **changes)), str(path), *words
    )


def test_a_pair_must_fit_a_micro_batch(offline: dict[str, Path]) -> None:
    """Together: its loss is not a sum over its answers. Rows of SFT are alone."""
    budget = "trainer.max_tokens_per_micro_batch=30"
    refused(
        DataError, offline_config(offline, "dpo", budget), "row 1 (taskset.train)", "two answers", "is 30; raise it"
    )
    checks.check(offline_config(offline, "sft", budget))
    checks.check(offline_config(offline, "dpo", budget, "trainer.packing=false"))
    refused(
        DataError,
        offline_config(offline, "sft", "trainer.max_tokens_per_micro_batch=5"),
        "row 1 (taskset.train)",
        "is 5",
    )


def test_half_a_micro_batch_must_hold_the_longest_rows(offline: dict[str, Path]) -> None:
    """A job that ran out of memory reads its rows again before it starts with half."""
    smaller, change = halved(offline_config(offline, "sft", "trainer.max_tokens_per_micro_batch=60"))
    assert change.new == smaller.trainer.max_tokens_per_micro_batch == 30
    with pytest.raises(DataError, match=r"row 1 \(taskset\.train\) .* two answers.* is 30; raise it"):
        halved(offline_config(offline, "dpo", "trainer.max_tokens_per_micro_batch=60"))


@pytest.mark.parametrize("name", KINDS)
def test_held_out_questions(offline: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Of a preference too, whatever its answers are."""
    asked = pq.read_table(offline[name] / "data" / "eval.parquet", partitioning=None).to_pylist()[2]["prompt"]
    config = offline_config(offline, name, with_row(offline[name], tmp_path / "rows.jsonl", "train", prompt=asked))
    refused(DataError, config, "line 4 (taskset.train) asks", "taskset.eval", asked[-1]["content"])


def test_an_offline_job_has_no_rewards_and_one_reference(offline: dict[str, Path]) -> None:
    refused(
        ConfigError, offline_config(offline, "dpo", "reference.refresh=2"), "reference.refresh=2", "offline", "never"
    )
    refused(ConfigError, offline_config(offline, "sft", "reward_model.path=/x"), "reward_model.path=/x", "offline")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"trainer.loop={__file__}", ["jobs that sample", "algorithm.name=sft trains on a file"]),
        ("evaluation.average=0.9", ["jobs that train on sampled answers", "leave it out"]),
    ],
)
def test_settings_of_jobs_that_sample(offline: dict[str, Path], override: str, words: list[str]) -> None:
    refused(ConfigError, offline_config(offline, "sft", override), override, *words)


def test_context_parallel_pieces_count(offline: dict[str, Path]) -> None:
    """A pair takes more room where each of its sequences is cut into 2·cp equal pieces."""
    lengths = next(iter(pair_lengths(offline["dpo"])))
    assert lengths % 8
    budget = f"trainer.max_tokens_per_micro_batch={2 * lengths}"
    grid = ["parallel=tp1", "parallel.dp=4", "reference.parallel.cp=4"]
    config = offline_config(offline, "dpo", budget, *grid, "taskset.eval_size=10")
    refused(DataError, config, "(taskset.train)", "two answers", f"is {2 * lengths}; raise it")


def pair_lengths(folder: Path) -> list[int]:
    """The longest sequence of each generated pair; both answers of a pair are equally long."""
    tokenizer = ChatTokenizer.open(folder / "model")
    ids = encode_preferences(read_preferences(folder / "data" / "train.parquet"), tokenizer)
    return sorted({len(prompt) + len(chosen) for prompt, chosen, _ in ids}, reverse=True)


def test_a_reward_model_may_start_from_one(offline: dict[str, Path], tmp_path: Path) -> None:
    """Without a warm start: from a sequence-classification checkpoint with one label, or from a language model."""
    model = tmp_path / "model"
    language = AutoModelForCausalLM.from_pretrained(offline["reward_model"] / "model")
    shutil.copytree(offline["reward_model"] / "model", model)
    overrides = [f"model.path={model}", "trainer.warm_start.steps=0"]
    checks.check(offline_config(offline, "reward_model", *overrides))
    for labels in (1, 2):
        language.config.num_labels = labels
        classifier = AutoModelForSequenceClassification.from_config(language.config)
        classifier.save_pretrained(model)
        config = offline_config(offline, "reward_model", *overrides)
        if labels == 1:
            checks.check(config)
            refused(
                CheckpointError, offline_config(offline, "reward_model", overrides[0]), str(model), "lm_head.weight"
            )
        else:
            refused(CheckpointError, config, str(model), "num_labels=2")
