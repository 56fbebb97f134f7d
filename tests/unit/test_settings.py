"""docs/settings.md names every setting, and is what ``megarl config --reference`` prints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from megarl import cli
from megarl.config import Config
from megarl.config.rewards import RewardConfig
from megarl.config.schema import CriticConfig, OptimizerConfig
from megarl.config.settings_page import SHARED, groups, reference, settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def names(kind: type, prefix: str) -> list[str]:
    """Every setting of a dataclass by its whole name."""
    found = []
    for field in fields(kind):
        name = f"{prefix}.{field.name}" if prefix else field.name
        hint: Any = get_type_hints(kind)[field.name]
        name += ".NAME" if get_origin(hint) is dict and is_dataclass(get_args(hint)[1]) else ""
        [*inner] = [k for k in (hint, *get_args(hint)) if isinstance(k, type) and is_dataclass(k)]
        found += names(inner[0], name) if inner else [name]
    return found


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "write it again: megarl config --reference > docs/settings.md"


def test_every_setting_has_one_row_with_a_meaning() -> None:
    rows = [row for prefix, kind in groups() for row in settings(kind, prefix)]
    assert [row.name for row in rows if not row.help] == []
    listed = [row.name.strip("`") for row in rows]
    shared = tuple(name.removesuffix("*") for name in listed if name.endswith("*"))
    every = names(Config, "")
    assert len(listed) == len(set(listed)) and len(every) > 200
    assert [name for name in every if name not in listed and not name.startswith(shared)] == []


def test_a_shared_group_says_where_its_rows_are_and_what_differs() -> None:
    [row] = [row for row in settings(CriticConfig, "critic") if row.name == "`critic.optimizer.*`"]
    assert (row.default, row.values) == ("`lr=1e-05`", "as `trainer.optimizer.*`")
    assert SHARED[OptimizerConfig] == "trainer.optimizer" and "`trainer.optimizer.lr`" in reference()


def test_values_are_the_bounds_and_choices() -> None:
    rows = {row.name.strip("`"): row for row in settings(RewardConfig, "reward")}
    assert rows["reward.retries"].values == "at least 0 and at most 100, whole"
    assert rows["reward.on_error"].values == "`drop`, `zero`, `mask`" and rows["reward.on_error"].default == "`drop`"
    assert rows["reward.judge.url"].default == "`null`"
