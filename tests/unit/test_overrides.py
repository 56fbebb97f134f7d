"""Overrides as they are typed: given twice, with characters that hydra's grammar keeps for itself, or in verl's
names."""

from __future__ import annotations

import re
import shlex

import pytest

from megarl.config import compose, to_dict
from megarl.config.hints import PEERS, VERL
from megarl.core.errors import ConfigError
from megarl.run.launch.sweep import combinations


@pytest.mark.parametrize(
    "twice",
    [
        ("trainer.steps=3", "trainer.steps=4"),
        ("trainer.steps=3", "++trainer.steps=4"),
        ("+taskset.options.max_terms=3", "taskset.options.max_terms=4"),
        ("run.name=a", "run.name="),
    ],
)
def test_a_setting_is_given_once(twice: tuple[str, str]) -> None:
    first, second = (word.lstrip("+") for word in twice)
    with pytest.raises(ConfigError, match=re.escape(f"{first} and {second} are both given; leave one of them out")):
        compose(twice)
    with pytest.raises(ConfigError, match="are both given"):
        combinations([*twice, "trainer.seed=1,2"])


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert compose(["trainer.steps=3", "trainer.steps=3"]).trainer.steps == 3


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("run.name=a=b", "run.name"),
        ("reward.judge.url=http://host:1/v1?x=y&z=1", "reward.judge.url"),
        ("store.url=postgresql://me@host/db?sslmode=require", "store.url"),
        ("run.name=it's", "run.name"),
        ('run.name=say "a"=b', "run.name"),
        ("run.name=a)b", "run.name"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_shown_in_quotes(override: str, setting: str) -> None:
    """The form that the message gives, read by a shell, is the value that was meant."""
    with pytest.raises(ConfigError) as raised:
        compose([override])
    [line] = str(raised.value).splitlines()
    assert override in line
    [quoted] = shlex.split(line.partition("write ")[2])
    section, *names = setting.split(".")
    value = to_dict(compose([quoted]))[section]
    for name in names:
        value = value[name]
    assert value == override.partition("=")[2]
    with pytest.raises(ConfigError, match="write "):
        combinations([override, "trainer.seed=1,2"])


def test_what_is_no_text_is_not_quoted() -> None:
    with pytest.raises(ConfigError, match="trainer.steps={") as raised:
        compose(["trainer.steps={"])
    assert "write " not in str(raised.value)


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("data.train_files=a.parquet", "taskset.train"),
        ("data.max_response_length=512", "rollout.max_response_tokens"),
        ("algorithm.adv_estimator=grpo", "algorithm=grpo"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "trainer.optimizer.lr"),
        ("+actor_rollout_ref.rollout.n=5", "algorithm.group_size"),
        ("trainer.total_epochs=15", "trainer.steps"),
        ("trainer.logger=[console]", "trainer.trackers"),
    ],
)
def test_names_of_verl_are_translated(override: str, ours: str) -> None:
    name = override.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigError, match=re.escape(f"{name} is verl's name; here it is {ours}")):
        compose([override])


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("learning_rate=1e-6", "trainer.optimizer.lr"),
        ("trainer.learning_rate=1e-6", "trainer.optimizer.lr"),
        ("num_generations=8", "algorithm.group_size"),
        ("beta=0.04", "algorithm.kl.coef"),
        ("+n_gpus_per_node=8", "parallel.dp"),
        ("lora_rank=16", "model.lora.rank"),
    ],
)
def test_names_of_other_libraries_are_translated(override: str, ours: str) -> None:
    name = override.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigError, match=re.escape(f"there is no setting {name!r}; what TRL, verl or")) as raised:
        compose([override])
    assert f"here {ours}" in str(raised.value)


def test_a_name_in_a_group_of_ours_lists_the_settings_of_the_group() -> None:
    with pytest.raises(ConfigError, match=r"here algorithm\.group_size; known: evaluation\.samples, "):
        compose(["evaluation.n=4"])


def test_every_translation_is_a_setting_and_no_setting_is_translated() -> None:
    config = to_dict(compose(["experiment=quickstart", "algorithm.name=mine.py"]))  # has settings of all

    def has(name: str) -> bool:
        tree = config
        for part in name.split("."):
            if not isinstance(tree, dict) or part not in tree:
                return False
            tree = tree[part]
        return True

    assert len(VERL) >= 30
    for name, ours in {**VERL, **PEERS}.items():
        assert not has(name), f"{name} is one of ours"
        settings = re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", ours.replace("docs/cluster.md", ""))
        assert settings or ours.startswith("algorithm="), name
        for setting in settings:
            assert has(setting), f"{name}: there is no {setting}"
