"""What is refused of teachers before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megarl.config import Config, compose
from megarl.config.load import to_dict
from megarl.core.errors import CheckpointError, ConfigError, DataError
from megarl.learn import algorithms
from megarl.learn.memory.phases import Phase
from megarl.learn.parallel.grid import roles_of, with_dp
from megarl.run.checks import job as checks
from megarl.run.checks.memory import ledger_of
from megarl.run.launch.bench import config_of_bench
from megarl.run.run_dir.changes import Change, changes
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.unit.small_job import config_of, refused
from tests.unit.test_role_checks import with_tokens


@pytest.fixture(scope="module")
def teacher(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of another size than the prepared job's, with the actor's tokenizer and a padded vocabulary."""
    return save(prepared, tmp_path_factory.mktemp("teacher") / "model", 160)


def save(prepared: Path, path: Path, vocab_size: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    shutil.copy(prepared / "model" / "tokenizer.json", path)
    return path


def taught_by(*paths: Path | str, more: tuple[str, ...] = ()) -> list[str]:
    """Settings of distillation from teachers ``t0``, ``t1``, …"""
    return [
        "algorithm=distill",
        "algorithm.kl.coef=0",
        *(f"teachers.t{i}.path={path}" for i, path in enumerate(paths)),
        *more,
    ]


def test_a_teacher_that_fits(prepared: Path, teacher: Path) -> None:
    more = ("teachers.t1.sources=[math/]", "teachers.t1.parallel={pp: 2}", "teachers.t1.offload=memory")
    config = config_of(prepared, *taught_by(teacher, teacher, more=more))
    checks.check(config)
    algorithm = algorithms.get("distill")
    assert roles_of(config, algorithm) == ["teachers.t0", "teachers.t1"]
    ledger = ledger_of(config, algorithm, read_hf_config(prepared / "model"))
    taught, update = (
        next(found for found in ledger if found.phase is phase) for phase in (Phase.TEACHERS, Phase.UPDATE)
    )
    assert taught.device["teachers.t0.parameters"] > 0 and taught.device["teachers.t1.parameters"] > 0
    assert "teachers.t0.parameters" in update.device and "teachers.t1.parameters" not in update.device
    nearest = ledger.nearest(ledger.most(Phase.UPDATE).total - 1)
    assert nearest is not None and nearest.away["teachers.t0"] == "memory", "teachers leave first"


def test_names_on_the_command_line(tmp_path: Path) -> None:
    base = ["experiment=quickstart", f"run.dir={tmp_path}", "algorithm=distill"]
    found = compose([*base, "+teachers.math.path=/m", "teachers.math.sources=[gsm8k]"]).teachers["math"]
    assert (found.path, found.sources, found.weight) == ("/m", ["gsm8k"], 1.0)
    for override, words in (
        ("teachers.math.paths=/m", "unknown setting 'teachers.math.paths'"),
        ("teachers.math.weight=1", "teachers.math has neither of path and url"),
        ("teachers={a-b: {path: /m}}", "a teacher is called 'a-b'"),
        ("teachers={m: {path: /m, weight: -1}}", "teachers.m.weight=-1 must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            compose([*base, override])


def test_teachers_and_algorithms(prepared: Path, teacher: Path) -> None:
    refused(ConfigError, config_of(prepared, "algorithm=distill"), "algorithm.name=distill", "teachers.NAME.path")
    for algorithm in ("grpo", "sft", "dpo"):
        config = config_of(prepared, f"algorithm={algorithm}", f"teachers.math.path={teacher}")
        refused(ConfigError, config, "teachers.math", f"algorithm.name={algorithm}", "algorithm=distill")
    single = config_of(prepared, *taught_by(teacher), "algorithm.group_size=1", "algorithm.reward_coef=0.5")
    refused(ConfigError, single, "algorithm.reward_coef=0.5", "algorithm.group_size is 1")
    assert config_of_bench(config_of(prepared, *taught_by(teacher)), prepared).teachers == {}


def test_divergences(prepared: Path, teacher: Path) -> None:
    def given(*more: str) -> Config:
        return config_of(prepared, *taught_by(teacher, more=more))

    for more in ((), ("algorithm.top_k=3",), ("algorithm.reward_coef=1", "algorithm.correction=truncate")):
        checks.check(given("algorithm.divergence=jsd", *more))
    refused(ConfigError, given("algorithm.top_k=3"), "algorithm.top_k=3 with algorithm.divergence=sampled")
    later = given("algorithm.divergence=forward_kl", "algorithm.gamma=0.5")
    refused(ConfigError, later, "algorithm.gamma=0.5 with algorithm.divergence=forward_kl", "set algorithm.gamma=0")
    actor = int(read_hf_config(prepared / "model")["vocab_size"])
    many = given("algorithm.divergence=reverse_kl", f"algorithm.top_k={actor + 1}")
    refused(ConfigError, many, f"algorithm.top_k={actor + 1}", f"teachers.t0.path={teacher}", f"{actor} ids in common")
    for beta in ("0", "1"):
        with pytest.raises(ConfigError, match=rf"algorithm.beta={beta} must be above 0 and below 1"):
            given("algorithm.divergence=jsd", f"algorithm.beta={beta}")


def test_a_weight_that_falls(prepared: Path, teacher: Path) -> None:
    def given(*more: str) -> Config:
        return config_of(prepared, *taught_by(teacher, more=("trainer.steps=10", *more)))

    refused(
        ConfigError, given("teachers.t0.decay_steps=9"), "teachers.t0.decay_steps=9", "trainer.steps=10", "reward_coef"
    )
    for more in (("teachers.t0.decay_steps=10",), ("teachers.t0.decay_steps=9", "algorithm.reward_coef=1")):
        checks.check(given(*more))


def test_expert_rows_and_parts_of_responses(prepared: Path, teacher: Path, tmp_path: Path) -> None:
    def given(*more: str) -> Config:
        rows = [{"prompt": "1 + 1 =", "response": "2", "data_source": source} for source in ("gsm8k", "web")]
        (tmp_path / "expert.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        expert = ("algorithm.expert_ratio=0.25", f"taskset.expert={tmp_path}/expert.jsonl", "algorithm.reward_coef=1")
        return config_of(prepared, *taught_by(teacher, more=(*expert, *more)))

    refused(ConfigError, given(), "algorithm.expert_ratio=0.25 with algorithm.divergence=sampled", "expert_ratio to 0")
    checks.check(given("algorithm.divergence=jsd", "algorithm.teacher_tokens=answer"))
    refused(
        DataError,
        given("algorithm.divergence=jsd", "teachers.t0.sources=[gsm8k]"),
        "expert.jsonl: line 2 (taskset.expert) has data_source 'web'",
        "teachers.t0.sources",
    )
    url = ("teachers.t0.path=null", "teachers.t0.url=http://localhost:1/v1", "algorithm.top_k=2")
    asked = config_of(prepared, "algorithm=distill", "algorithm.divergence=jsd", "algorithm.expert_ratio=0.25", *url)
    refused(ConfigError, asked, "teachers.t0.url with algorithm.expert_ratio=0.25", "teachers.NAME.path")
    late = ("sync.max_staleness=1", "algorithm.segments=current", "algorithm.teacher_tokens=thinking")
    both = given("algorithm.divergence=jsd", *late)
    refused(ConfigError, both, "algorithm.teacher_tokens=thinking with algorithm.segments=current", "to all")


def test_two_teachers_of_one_source(prepared: Path, teacher: Path) -> None:
    refused(
        ConfigError,
        config_of(prepared, *taught_by(teacher, teacher)),
        "teachers.t0 and teachers.t1 both have no sources",
        "teachers.t1.sources",
    )
    more = ("teachers.t0.sources=[a,b]", "teachers.t1.sources=[b]")
    refused(ConfigError, config_of(prepared, *taught_by(teacher, teacher, more=more)), "both have 'b'", "leave it in")
    more = ("teachers.t0.sources=['']",)
    refused(ConfigError, config_of(prepared, *taught_by(teacher, more=more)), "teachers.t0.sources has an empty text")


def test_a_task_without_a_teacher(prepared: Path, teacher: Path) -> None:
    more = ("teachers.t0.sources=[gsm8k]",)
    words = (
        "which no teacher has among its sources",
        "teachers.t0.sources",
        "algorithm.reward_coef",
        "(taskset.train)",
    )
    refused(DataError, config_of(prepared, *taught_by(teacher, more=more)), *words)
    checks.check(config_of(prepared, *taught_by(teacher, more=(*more, "algorithm.reward_coef=1"))))


def test_the_vocabulary(prepared: Path, teacher: Path, tmp_path: Path) -> None:
    other = with_tokens(teacher, tmp_path / "other", 1)
    refused(
        ConfigError,
        config_of(prepared, *taught_by(other)),
        f"teachers.t0.path={other}",
        "the actor's token",
        "same tokenizer",
    )
    added = Path(shutil.copytree(teacher, tmp_path / "added"))
    tokenizer = json.loads((added / "tokenizer.json").read_text())
    special = tokenizer["added_tokens"][0]
    special["content"] = "<another>"
    tokenizer["model"]["vocab"] = {token: n for token, n in tokenizer["model"]["vocab"].items() if n != special["id"]}
    (added / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(ConfigError, config_of(prepared, *taught_by(added)), f"the actor's token {special['id']}", "does not occur")
    small = save(prepared, tmp_path / "small", 8)
    refused(ConfigError, config_of(prepared, *taught_by(small)), "vocab_size=8", "the actor's tokens go up to")


def test_files_of_a_teacher(prepared: Path, teacher: Path, tmp_path: Path) -> None:
    missing = "teachers.t0.path: /nonexistent has no config.json; set teachers.t0.path to"
    refused(CheckpointError, config_of(prepared, *taught_by("/nonexistent")), missing)
    hollow = Path(shutil.copytree(teacher, tmp_path / "hollow"))
    (hollow / "model.safetensors").unlink()
    refused(
        CheckpointError,
        config_of(prepared, *taught_by(hollow)),
        f"teachers.t0.path={hollow}",
        "set teachers.t0.path to",
    )
    wrong = config_of(prepared, *taught_by(teacher, more=("teachers.t0.parallel={tp: 4}",)))
    refused(ConfigError, wrong, "teachers.t0.parallel", "4 ranks")


def test_another_teacher_is_another_training(prepared: Path, teacher: Path) -> None:
    one, more = (to_dict(config_of(prepared, *taught_by(*paths))) for paths in ((teacher,), (teacher, "/m")))
    [added] = changes(one, more)
    assert added.setting == "teachers.t1" and added.trains()
    assert Change("teachers.t0.path", "/a", "/b").trains() and Change("teachers.t0.weight", 1.0, 2.0).trains()
    assert not Change("teachers.t0.parallel.dp", 1, 2).trains() and not Change("teachers.t0.offload", "a", "b").trains()
    shrunk = with_dp(
        config_of(prepared, *taught_by(teacher, more=("teachers.t0.parallel={dp: 4}",)), "parallel.dp=2"), 1
    )
    assert shrunk is not None and shrunk.teachers["t0"].parallel is not None
    assert shrunk.teachers["t0"].parallel.dp == 2
