"""Runs of earlier versions are read with the names that settings had then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.config.load import load_resolved, save_resolved, to_dict
from megarl.config.renamed import RENAMED, with_new_names


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_is_read_by_its_earlier_name(tmp_path: Path, old: str) -> None:
    path = tmp_path / "resolved.json"
    save_resolved(Config(), path)
    values, (group, name), new = json.loads(path.read_text()), old.split("."), RENAMED[old].split(".")[1]
    values[group][name] = values[group].pop(new)
    path.write_text(json.dumps(values))
    assert load_resolved(path) == Config()


def test_names_of_today_are_left_as_they_are() -> None:
    values = to_dict(Config())
    assert with_new_names(values) == values
