"""Runs of earlier versions are read with the settings that there were then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.core.config import Config
from megarl.core.config.algorithms import PPOConfig
from megarl.core.config.earlier import RENAMED, upgraded
from megarl.core.config.load import load_resolved, save_resolved, to_dict
from megarl.core.errors import ConfigError


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_is_read_by_its_earlier_name(tmp_path: Path, old: str) -> None:
    path, config = tmp_path / "resolved.json", Config(algorithm=PPOConfig(name="ppo"))
    save_resolved(config, path)
    values, (group, name), new = json.loads(path.read_text()), old.split("."), RENAMED[old].split(".")[1]
    values[group][name] = values[group].pop(new)
    path.write_text(json.dumps(values))
    assert load_resolved(path) == config


def test_settings_of_other_algorithms_are_left_out(tmp_path: Path) -> None:
    """Earlier versions wrote those of all algorithms into every file; a setting of none is still an error."""
    path = tmp_path / "resolved.json"
    values = to_dict(Config())
    values["algorithm"] |= {"gamma": 0.9, "bootstrap_cut": True}
    path.write_text(json.dumps(values))
    assert load_resolved(path) == Config()
    values["algorithm"] |= {"gama": 0.9}
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="algorithm.gama"):
        load_resolved(path)


def test_settings_of_today_are_left_as_they_are() -> None:
    values = to_dict(Config())
    assert upgraded(values) == values
