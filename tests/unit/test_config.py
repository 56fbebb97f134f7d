"""Settings: every shipped file composes; a wrong key or value is named with the nearest right one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from megarl.config import compose, config_dir, from_dict, load_resolved, save_resolved, to_dict
from megarl.config.algorithms import SETTINGS, AnyAlgorithmConfig, PPOConfig
from megarl.config.bounds import bound_of
from megarl.config.load import numbers
from megarl.config.schema import Config, FromScratchConfig, ModelConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import ALGORITHMS


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_dir() / "experiment").glob("*.yaml")))
def test_experiments_compose(name: str) -> None:
    yours = ["model.path=/m", "taskset.train=a.parquet", "taskset.eval=b.parquet"]
    assert compose([f"experiment={name}", *(yours if name.startswith("own") else [])]).run.name == name


def test_with_ones_own_experiment_the_preset_holds() -> None:
    yours = ["experiment=own", "taskset.train=a.parquet", "taskset.eval=b.parquet"]
    with pytest.raises(ConfigError, match="no value for model.path"):
        compose(yours)
    config = compose([*yours, "model.path=/m", "algorithm=grpo_r1"])
    assert (config.algorithm.kl.coef, config.trainer.optimizer.lr, config.reference.refresh) == (0.001, 3e-6, 25)
    assert (config.trainer.tasks_per_step, config.algorithm.group_size, config.trainer.updates_per_step) == (
        512,
        16,
        16,
    )


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_dir() / "parallel").glob("*.yaml")))
def test_one_override_changes_the_grid(name: str) -> None:
    config = compose(["experiment=quickstart", f"parallel={name}"])
    degrees = {key: getattr(config.parallel, key) for key in ("tp", "pp", "vpp", "dp", "cp", "ep")}
    text = "".join(f"{k}{v}" for k, v in degrees.items() if v > 1) + "sp" * config.parallel.sequence_parallel
    assert text == name.replace("tp1", "")


def test_every_number_has_bounds_and_every_default_is_within() -> None:
    """A new number needs a bound in its type."""

    def unbounded(cls: Any, where: str = "") -> Iterator[str]:
        bounds = get_type_hints(cls, include_extras=True)
        for name, hint in get_type_hints(cls).items():
            parts = (hint, *get_args(hint))
            inner = next((part for part in parts if is_dataclass(part)), None)
            if inner is not None:
                yield from unbounded(inner, f"{where}{name}.")
            elif get_origin(hint) is not dict and (int in parts or float in parts) and bound_of(bounds[name]) is None:
                yield where + name

    assert list(unbounded(Config)) == []
    defaults = list(numbers(Config(model=ModelConfig(from_scratch=FromScratchConfig()))))
    assert len(defaults) > 100
    assert not [n.name for n in defaults if n.bound is None or not n.bound.admits(n.value)]


def test_algorithms_have_settings_of_their_own(tmp_path: Path) -> None:
    """Those of other algorithms are refused, with the names of the algorithms that have them."""
    config = compose(["algorithm=ppo", "algorithm.gamma=0.9"])
    assert type(config.algorithm) is PPOConfig and config.algorithm.gamma == 0.9
    save_resolved(config, tmp_path / "resolved.json")
    assert load_resolved(tmp_path / "resolved.json") == config
    for refused in (["algorithm.gamma=0.9"], ["algorithm=ppo", "algorithm.name=cispo"]):
        with pytest.raises(ConfigError, match="algorithm.gamma=.* is a setting of ppo, reinforce_pp, remax"):
            compose(refused)
    with pytest.raises(ConfigError, match="algorithm.gamma=2 must be at least 0 and at most 1; the default is 1"):
        compose(["algorithm=remax", "algorithm.gamma=2"])


def test_an_algorithm_in_a_file_has_the_settings_of_all() -> None:
    own = compose(["algorithm.name=mine.py", "algorithm.gamma=0.9", "algorithm.mu=0.3"]).algorithm
    assert isinstance(own, AnyAlgorithmConfig) and (own.gamma, own.mu) == (0.9, 0.3)
    everything = {f.name for f in fields(AnyAlgorithmConfig)}
    assert all({f.name for f in fields(kind)} <= everything for kind in SETTINGS.values())
    assert set(SETTINGS) <= set(ALGORITHMS)


def test_a_group_is_given_once() -> None:
    compose(["parallel=pp2", "parallel=pp2"])
    with pytest.raises(ConfigError, match="parallel=pp2 and parallel=dp2 are both given"):
        compose(["parallel=pp2", "parallel=dp2"])


def test_known_settings_are_named_once() -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["trianer=3"])
    known = str(raised.value).partition("known: ")[2].split(", ")
    assert len(known) == len(set(known)) and {"trainer", "parallel", "experiment"} <= set(known)


def test_round_trip(tmp_path: Path) -> None:
    config = compose(["trainer.optimizer.lr=1e-4", "taskset.options.max_terms=3", "reference.refresh=5"])
    assert config.trainer.optimizer.lr == 1e-4
    assert from_dict(Config, to_dict(config)) == config
    save_resolved(config, tmp_path / "c.json")
    assert load_resolved(tmp_path / "c.json") == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.stesp=3", ["trainer.stesp", "did you mean 'trainer.steps'"]),
        ("trianer.steps=3", ["did you mean 'trainer'"]),
        ("parallel=tp3", ["tp3", "tp2"]),
        ("trainer.steps=many", ["trainer.steps='many'", "int"]),
        ("algorithm.kl.estimator=k4", ["algorithm.kl.estimator='k4'", "k2, k3"]),
        ("trainer.steps", ["key=value"]),
        ("trainer.optimizer.lr=fast", ["trainer.optimizer.lr", "float"]),
        ("trainer.optimizer.lr=-1", ["trainer.optimizer.lr=-1", "at least 0", "default is 1e-06"]),
        ("trainer.optimizer.lr=nan", ["trainer.optimizer.lr=nan", "finite"]),
        ("trainer.optimizer.lr=1e99", ["trainer.optimizer.lr=1e+99", "at most 1"]),
        ("trainer.warm_start.optimizer.beta1=1", ["trainer.warm_start.optimizer.beta1=1", "below 1"]),
        ("algorithm.clip_low=-1", ["algorithm.clip_low=-1", "at least 0"]),
        ("algorithm.correction=tis", ["algorithm.correction='tis'", "none, truncate, mask"]),
        ("algorithm.correction_cap=0.5", ["algorithm.correction_cap=0.5", "at least 1", "default is 2"]),
        ("algorithm.tau=-1", ["algorithm.tau=-1", "kimi_mirror_descent, opmd", "not of grpo"]),
        ("algorithm.importance=sequence", ["algorithm.importance='sequence'", "sequence_mean"]),
        ("algorithm.options.margin=wide", ["algorithm.options.margin='wide'", "float"]),
        ("algorithm.entropy_coef=inf", ["algorithm.entropy_coef=inf", "finite"]),
        ("trainer.warm_start.steps=-1", ["trainer.warm_start.steps=-1", "at least 0"]),
        ("reward.timeout_s=0", ["reward.timeout_s=0", "above 0"]),
        ("rollout.block_size=7", ["rollout.block_size=7", "multiple of 32"]),
        ("rollout.kv_cache_bytes=10", ["rollout.kv_cache_bytes=10", "1048576"]),
        ("sync.bucket_bytes=1", ["sync.bucket_bytes=1", "at least 4096"]),
        ("taskset.train_size=0", ["taskset.train_size=0", "at least 1"]),
        ("trainer.optimizer.decay_steps=0", ["trainer.optimizer.decay_steps=0", "leave it out"]),
        ("run.name=", ["run.name=''", "plain name"]),
        ("run.name=a/b", ["run.name='a/b'", "run.dir"]),
    ],
)
def test_errors_name_setting_value_and_mend(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        compose([override])
    for word in words:
        assert word in str(error.value)
