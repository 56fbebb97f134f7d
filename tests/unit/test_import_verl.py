"""Import of verl's configurations: 30 published commands, the table, the reader of scripts, the command."""

from __future__ import annotations

import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config import compose
from megarl.config.overrides import check_setting
from megarl.config.verl.imported import ImportedKeys, check_experiment_file, convert, experiment, row_of
from megarl.config.verl.shell_reader import arithmetic, read_script
from megarl.config.verl.verl_rules import RULES
from megarl.config.verl.verl_source import VerlSource, read_source
from megarl.config.verl.verl_table import DEFAULTS, MAPPED, NO_EFFECT, UNMAPPED
from megarl.core.errors import ConfigError

COMMANDS = (Path(__file__).parent / "cases" / "verl_commands.txt").read_text().split("\n# ")
"""Published commands, the head of each with repository, commit and path; variables are replaced by their values."""
ROWS = 10_000
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
LEFT_OUT: dict[str, set[str]] = {
    "examples/rloo_trainer/run_qwen2-7b.sh": {
        "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_penalty",
        "algorithm.kl_ctrl.kl_coef",
    },
    "examples/gspo_trainer/test_gspo_qwen30b_a3b_ep.sh": {
        "data.truncation",
        f"{_ROLLOUT}.tensor_model_parallel_size",
        f"{_ROLLOUT}.data_parallel_size",
        f"{_ROLLOUT}.expert_parallel_size",
    },
    "examples/gmpo_trainer/test_dapo_7b_math.sh": {
        "data.truncation",
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.model.override_config.max_position_embeddings",
    },
    "examples/sglang_multiturn/run_qwen3_4b_dapo_multiturn.sh": {
        "data.custom_cls.path",
        "data.custom_cls.name",
        f"{_ROLLOUT}.multi_turn.enable",
        f"{_ROLLOUT}.multi_turn.max_user_turns",
        f"{_ROLLOUT}.multi_turn.max_assistant_turns",
        f"{_ROLLOUT}.multi_turn.tool_config_path",
        f"{_ROLLOUT}.val_kwargs.n",
        f"{_ROLLOUT}.val_kwargs.temperature",
        f"{_ROLLOUT}.val_kwargs.top_p",
    },
    "recipe/dapo/run_dapo_qwen2.5_32b.sh": {"data.truncation"},
    "recipe/dapo/run_dapo_qwen2.5_32b_rollout_corr.sh": {
        "data.truncation",
        f"{_CORRECTION}.rollout_is",
        f"{_CORRECTION}.rollout_is_threshold",
        f"{_CORRECTION}.rollout_is_batch_normalize",
        f"{_CORRECTION}.rollout_rs",
        f"{_CORRECTION}.rollout_token_veto_threshold",
    },
}
"""Path of a script -> keys that are not imported, of those that leave some out."""


def path_of(command: str) -> str:
    return command.splitlines()[0].rpartition(":")[2]


@functools.cache
def imported(command: str) -> ImportedKeys:
    return convert(source_of(command))


def source_of(command: str) -> VerlSource:
    [words] = read_script(command.partition("\n")[2], {}).commands
    return read_source(None, words, {}, rows=ROWS)


def source(**values: Any) -> VerlSource:
    return VerlSource({**BASE, **{key.replace("__", "."): value for key, value in values.items()}}, rows=ROWS)


BASE = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4, "algorithm.adv_estimator": "grpo"}


# -------------------------------------------------------- published commands


def test_there_are_thirty_commands_and_two_thirds_are_whole() -> None:
    assert len(COMMANDS) == 30
    assert sum(imported(command).is_whole for command in COMMANDS) >= 20


@pytest.mark.parametrize("command", COMMANDS, ids=path_of)
def test_every_key_of_a_published_command_is_accounted_for(command: str) -> None:
    found, given = imported(command), source_of(command).values
    assert set(found.mapped) | set(found.no_effect) | set(found.unmapped) == set(given)
    assert not set(found.mapped) & set(found.no_effect) and not set(found.mapped) & set(found.unmapped)
    assert set(found.unmapped) == LEFT_OUT.get(path_of(command), set()), found.unmapped


@pytest.mark.parametrize("command", COMMANDS, ids=path_of)
def test_a_published_command_becomes_settings_that_compose(command: str) -> None:
    found = imported(command)
    for setting in found.settings:
        check_setting(setting)
    check_experiment_file(experiment(found, "test"), found)


def test_values_of_a_command_are_those_of_its_experiment(tmp_path: Path) -> None:
    command = next(c for c in COMMANDS if path_of(c).endswith("ppo_trainer/run_gemma.sh"))
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "gemma.yaml").write_text(experiment(imported(command), "test"))
    config = compose(["experiment=gemma"], own=tmp_path / "conf")
    assert (config.algorithm.name, config.trainer.tasks_per_step, config.trainer.updates_per_step) == ("ppo", 512, 4)
    assert (config.trainer.steps, config.trainer.optimizer.beta2, config.critic.optimizer.lr) == (285, 0.999, 1e-5)
    assert (config.rollout.replicas, config.rollout.placement, config.parallel.dp) == (1, "colocated", 1)
    assert (config.algorithm.kl.coef, config.algorithm.dual_clip) == (0.0, 3.0)


# ------------------------------------------------------------------ the table


def test_every_row_names_a_rule_and_every_rule_has_a_row() -> None:
    assert {row.rule for row in MAPPED.values()} == set(RULES)
    assert not set(MAPPED) & (set(NO_EFFECT) | set(UNMAPPED)) - {"actor_rollout_ref.model.use_remove_padding"}


MEGATRON = {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2}
CONTEXTS: list[dict[str, Any]] = [
    {},
    {"algorithm.adv_estimator": "gae"},
    MEGATRON,
    MEGATRON | {"algorithm.adv_estimator": "gae"},
    {"actor_rollout_ref.actor.use_kl_loss": True},
    {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True},
    {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    {"actor_rollout_ref.model.lora_rank": 8},
    {"reward_model.enable": True, "reward_model.model.path": "/rm"},
    {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": True},
    {"reward_model.overlong_buffer.enable": True},
    {"algorithm.filter_groups.enable": True},
    {"algorithm.rollout_correction.rollout_is": "token"},
    {"actor_rollout_ref.rollout.val_kwargs.do_sample": True},
    {"actor_rollout_ref.rollout.val_kwargs.do_sample": True, "actor_rollout_ref.rollout.val_kwargs.temperature": 1},
    {"actor_rollout_ref.actor.use_dynamic_bsz": True},
    {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": None},
    {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"},
    {"actor_rollout_ref.actor.clip_ratio_low": None},
    {"actor_rollout_ref.actor.router_replay.mode": "R3"},
    MEGATRON | {"actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity": "selective"},
    MEGATRON | {"actor_rollout_ref.actor.optim.lr_decay_style": "linear"},
    MEGATRON | {"algorithm.adv_estimator": "gae", "critic.optim.lr_decay_style": "linear"},
    {"reward_model.enable": True, "reward_model.model.path": "/rm", "custom_reward_function.path": "r.py"},
]
VALUES = [
    True, False, 2, 4, 7, 0.5, 1.5, -1, "x", "/a", "fp32", "gspo", "sequence", "R3", "linear", "token", "remax",
    "mse", "k2", ["q_proj"], ["mlp"], {"a": 1}, "float32", "adaptive", "seq-mean-token-mean", [0.5, 0.6], "constant",
    "tensorboard", 256, 1024,
]  # fmt: skip
ONLY_READ = {
    "algorithm.filter_groups.metric", "data.truncation", "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.top_k", "critic.ppo_epochs", "critic.ppo_mini_batch_size",
    "reward_model.reward_kwargs.max_resp_len", "actor_rollout_ref.actor.optim.min_lr_ratio",
    "critic.optim.min_lr_ratio", "actor_rollout_ref.model.lora.type", "actor_rollout_ref.model.lora.lora_A_init_method",
    "actor_rollout_ref.actor.optim.lr_scheduler_type", "actor_rollout_ref.actor.optim.warmup_style",
    "critic.optim.lr_scheduler_type", "critic.optim.warmup_style",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    "actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type",
}  # fmt: skip
"""Keys whose only other value is refused, or that another key repeats."""


def settings_with(values: dict[str, Any]) -> dict[str, Any]:
    return convert(VerlSource({**BASE, **values}, rows=ROWS)).settings


@functools.cache
def base_settings(number: int) -> dict[str, Any]:
    return settings_with(CONTEXTS[number])


@pytest.mark.parametrize("key", sorted(set(MAPPED) - ONLY_READ))
def test_a_mapped_key_has_an_effect(key: str) -> None:
    assert any(
        settings_with(context | {key: value}) != base_settings(number)
        for number, context in enumerate(CONTEXTS)
        for value in VALUES
    )


def test_patterns_are_found_from_long_to_short() -> None:
    assert row_of("trainer.nothing_of_this_name") is None
    assert row_of("actor_rollout_ref.ref.strategy") == NO_EFFECT["*.strategy"] or isinstance(
        row_of("actor_rollout_ref.ref.strategy"), str
    )
    assert row_of("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space") is not None
    assert all(fnmatchcase(pattern.replace("*", "x"), pattern) for pattern in [*NO_EFFECT, *UNMAPPED])
    assert all(key in MAPPED for key in DEFAULTS)


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({"data__train_batch_size": 64, "actor_rollout_ref__actor__ppo_mini_batch_size": 16}, "updates_per_step", 4),
        ({"trainer__total_epochs": 2}, "trainer.steps", 2 * (ROWS // 1024)),
        ({"trainer__save_freq": -1, "trainer__total_training_steps": 9}, "trainer.checkpoint_interval", 9),
        ({"trainer__total_training_steps": 40, "actor_rollout_ref__actor__optim__lr_warmup_steps_ratio": 0.1},
         "trainer.optimizer.warmup_steps", 4),
        ({"actor_rollout_ref__actor__use_dynamic_bsz": True,
          "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2},
         "max_tokens_per_micro_batch", 32768),
        ({"trainer__logger": ["console", "wandb"]}, "trainer.trackers", ["wandb"]),
        ({"trainer__experiment_name": "a/b c"}, "run.name", "a-b-c"),
        ({"data__train_files": ["/a", "/b"]}, "taskset.train", ["/a", "/b"]),
    ],
)  # fmt: skip
def test_computed_values(given: dict[str, Any], setting: str, value: Any) -> None:
    settings = convert(source(**given)).settings
    [found] = [settings[name] for name in settings if name.endswith(setting)]
    assert found == value


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"trainer__nope": 1}, "trainer.nope", "does not know"),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 100}, "data.train_batch_size", "do not divide"),
        ({"actor_rollout_ref__rollout__top_p": 0.9}, "actor_rollout_ref.rollout.top_p", "whole distribution"),
        ({"actor_rollout_ref__actor__ppo_epochs": "$N"}, "actor_rollout_ref.actor.ppo_epochs", "needs a shell"),
        ({"trainer__save_freq": "often"}, "trainer.save_freq", "no usable value"),
        ({"actor_rollout_ref__actor__optim__lr_scheduler_type": "cosine"},
         "actor_rollout_ref.actor.optim.lr_scheduler_type", "linear, not cosine"),
        ({"trainer__logger": ["swanlab"]}, "trainer.logger", "swanlab"),
    ],
)  # fmt: skip
def test_what_is_not_imported_says_what_to_do(given: dict[str, Any], key: str, words: str) -> None:
    assert words in convert(source(**given)).unmapped[key]


def test_a_kl_without_a_counterpart_is_left_out() -> None:
    """No default of megarl takes its place."""
    given = {"algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True}
    found = convert(VerlSource(given, rows=ROWS))
    assert "algorithm.use_kl_in_reward" in found.unmapped and found.settings["algorithm.kl.coef"] == 0.0


def test_epochs_need_a_number_of_rows() -> None:
    found = convert(VerlSource({**BASE, "trainer.total_epochs": 3}))
    assert "--rows" in found.unmapped["trainer.total_epochs"]
    assert "trainer.steps" not in found.settings


# ---------------------------------------------------------- reader of scripts


SCRIPT = """#!/bin/bash
set -x
MODEL=${MODEL:-"${HOME}/models/Qwen"} ; export N=4
LENGTH=$((1024 * (N - 2)))  # two
DATA=(
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']"
    data.max_prompt_length=${LENGTH} # no word
)
cat <<EOF
python3 -m verl.trainer.main_ppo trainer.nnodes=99
EOF
if [ -n "$X" ]; then
    OTHER=1
fi
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.model.path=$MODEL trainer.logger='["console","wandb"]' \\
    trainer.experiment_name="at_$(touch TOUCHED)" trainer.nnodes=${OTHER} +a.b=`touch TOUCHED` $@ 2>&1 | tee log
"""


def test_a_script_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("TOUCHED", str(tmp_path / "touched")))
    read = read_source(str(tmp_path / "run.sh"), ["N=6", "trainer.save_freq=5"], {"HOME": "/home/me", "SECRET": "s"})
    assert read.values["data.train_files"] == ["/home/me/a.parquet", "/home/me/b.parquet"]
    assert read.values["data.max_prompt_length"] == 2048  # the script's own N comes last
    assert read.values["actor_rollout_ref.model.path"] == "/home/me/models/Qwen"
    assert read.values["trainer.logger"] == ["console", "wandb"]
    assert read.values["trainer.save_freq"] == 5
    assert read.notes == ["OTHER is assigned inside a condition or loop, which is not followed"]
    found = convert(read)
    assert {"trainer.experiment_name", "trainer.nnodes", "a.b"} <= set(found.unmapped)
    assert not (tmp_path / "touched").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo a'b c'\"d e\"f", ["echo", "ab cd ef"]),
        ("A='x y'\necho $A \"$A\"", ["echo", "x", "y", "x y"]),
        ("echo ${A:-${B:-c}} ${A-d}", ["echo", "c", "d"]),
        ("A=1\necho ${A:+yes}${Z:+no} $A$A ${A}0", ["echo", "yes", "11", "10"]),
        ("echo a\\\nb \\$A", ["echo", "ab", "$A"]),
        ("echo $Z ${Z%x} $(date +%s)", ["echo", "$Z", "${Z%x}", "$(date +%s)"]),
        ("A=(1 \"2 3\")\necho \"${A[@]}\"", ["echo", "1", "2 3"]),
        ("echo $((2*(3+4))) $((Z+1))", ["echo", "14", "$((Z+1))"]),
    ],
)  # fmt: skip
def test_words_of_a_shell(text: str, words: list[str]) -> None:
    assert read_script(text, {}).commands[-1] == words


@pytest.mark.parametrize("text", ["9**9**9", "__import__('os')", "1/0", "x", "(" * 500, "1 if 1 else 2", "'a'*9"])
def test_arithmetic_is_of_integers_alone(text: str) -> None:
    assert arithmetic(text) is None


@pytest.mark.parametrize("text", ["'", '"', "${", "$((", "A=(", "`", "\\", "<", "$", "echo ${A:-", "<<E\nx", "$(("])
def test_a_script_that_ends_early_is_read_to_its_end(text: str) -> None:
    read_script(text, {})


# ------------------------------------------------------------ YAML, the command


YAML = """
defaults: [ppo_trainer, _self_]
hydra: {searchpath: ["file://verl/trainer/config"]}
data: {train_files: /a.parquet, val_files: /b.parquet, max_response_length: 256}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: /m, override_config: {}}
  actor: {ppo_micro_batch_size_per_gpu: 2, optim: {lr: 1e-6}}
  rollout: {n: 8, response_length: "${oc.select:data.max_response_length,512}", log_prob_use_dynamic_bsz: "${.none}"}
trainer: {total_training_steps: 20, experiment_name: yaml, default_local_dir: "runs/${trainer.experiment_name}"}
"""


def test_a_yaml_file_becomes_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ppo.yaml").write_text(YAML)
    target = tmp_path / "conf" / "experiment" / "mine.yaml"
    assert (
        main(["config", "import-verl", str(tmp_path / "ppo.yaml"), "trainer.save_freq=3", "--write", str(target)]) == 0
    )
    printed = capsys.readouterr().out
    assert printed == f"megarl train --config-dir {tmp_path}/conf experiment=mine\n"
    config = compose(["experiment=mine"], own=tmp_path / "conf")
    assert (config.trainer.checkpoint_interval, config.run.dir, config.algorithm.group_size) == (3, "runs/yaml", 8)
    assert config.trainer.optimizer.lr == 1e-6 and config.model.path == "/m"


def test_a_command_line_is_printed_as_yaml(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        words = [
            "python3",
            "-m",
            "verl.trainer.main_ppo",
            "algorithm.adv_estimator=rloo",
            "trainer.nope=1",
            "data.seed=3",
        ]
        assert main(["config", "import-verl", "--rows", "2048", "--", *words]) == 0
    written = yaml.safe_load(capsys.readouterr().out)
    assert (written["algorithm"]["name"], written["trainer"]["seed"], written["trainer"]["steps"]) == ("rloo", 3, 60)
    assert "NOT IMPORTED trainer.nope" in caplog.text
    assert re.search(r"2 keys mapped, 0 without effect, \d+ not imported", caplog.text)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.sh", "python3 -m verl.trainer.sft_trainer a.b=1", r"starts no verl.trainer.main_ppo; it starts verl"),
        ("a.yaml", "- 1", "holds list, not settings"),
        ("a.yaml", "a: {", "is no YAML file"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_source(str(tmp_path / name), [], {})
    assert main(["config", "import-verl", str(tmp_path / name)]) == 2


def test_the_place_of_an_experiment_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["config", "import-verl", "--write", str(tmp_path / "a.yaml"), "--", "data.seed=3"]) == 2
    assert "give DIR/experiment/NAME.yaml" in caplog.text
