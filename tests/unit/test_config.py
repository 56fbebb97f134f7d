"""Settings: every shipped file composes; a wrong key or value is named with the nearest right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import compose, config_dir, from_dict, load_resolved, save_resolved, to_dict
from megarl.config.schema import Config
from megarl.errors import ConfigError


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_dir() / "experiment").glob("*.yaml")))
def test_experiments_compose(name: str) -> None:
    assert compose([f"experiment={name}"]).run.name


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_dir() / "parallel").glob("*.yaml")))
def test_one_override_changes_the_grid(name: str) -> None:
    config = compose(["experiment=quickstart", f"parallel={name}"])
    degrees = {"tp": config.parallel.tp, "pp": config.parallel.pp, "dp": config.parallel.dp}
    assert "".join(f"{k}{v}" for k, v in degrees.items() if v > 1) == name.replace("tp1", "")


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
        ("algorithm.kl.estimator=k1", ["algorithm.kl.estimator='k1'", "k2, k3"]),
        ("trainer.steps", ["key=value"]),
        ("trainer.optimizer.lr=fast", ["trainer.optimizer.lr", "float"]),
    ],
)
def test_errors_name_setting_value_and_mend(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        compose([override])
    for word in words:
        assert word in str(error.value)
