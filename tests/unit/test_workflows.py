"""Workflows by name, and from a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.explore import workflows


def test_by_name() -> None:
    assert [workflows.get(RolloutConfig(workflow=name)).__name__ for name in workflows.WORKFLOWS] == [
        *workflows.WORKFLOWS
    ]
    others = ", ".join((*workflows.WORKFLOWS, "tools", "environment", "agent"))
    with pytest.raises(ConfigError, match=f"'debate' does not exist; choose one of {others}, or give a Python file"):
        workflows.get(RolloutConfig(workflow="debate"))


def test_of_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("async def workflow(task, model):\n    model.ask(task)\n    await model.generate()\n")
    assert workflows.get(RolloutConfig(workflow=str(path))).__name__ == "workflow"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def workflow(task, model): ...", "has no async def workflow"),
        ("x = 1", "has no async def workflow"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        (None, "no such file"),
    ],
)
def test_a_file_without_one_is_refused(tmp_path: Path, source: str | None, words: str) -> None:
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=words) as refused:
        workflows.get(RolloutConfig(workflow=str(path)))
    assert f"rollout.workflow={path}" in str(refused.value)
