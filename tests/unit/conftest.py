from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import kept_trees
from tests.unit.small_job import config_of


@pytest.fixture(scope="session", autouse=True)
def _kept_trees() -> Iterator[None]:
    """``compose`` sets values in trees that hydra has composed before; ``test_kept_trees.py`` compares the two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra.compose", kept_trees.compose)
        yield


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of ``small_job`` with data and model, made by the check itself; no test changes them."""
    from megarl.run.checks import job as checks

    folder = tmp_path_factory.mktemp("prepared")
    tasks = checks.check(config_of(folder))
    assert {split: len(found.tasks) for split, found in tasks.items()} == {"train": 30, "eval": 10}
    return folder


@pytest.fixture
def soon_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator counts as exhausted after fewer draws: the words are the same, and nobody waits for 50,000."""
    monkeypatch.setattr(importlib.import_module("megarl.tasks.generators.generate"), "MAX_DRY_DRAWS", 2000)
