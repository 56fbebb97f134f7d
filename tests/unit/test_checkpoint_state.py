"""Which checkpoints count and which go, from the folder alone: what a job that died at any line may have left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.checkpoint import state


def checkpoint(folder: Path, step: int, *, finished: bool = True) -> Path:
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "shard").write_text("weights")
    if finished:
        (path / "state.json").write_text("{}")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_finished_one_counts(tmp_path: Path) -> None:
    assert state.latest(tmp_path / "none") is None
    checkpoint(tmp_path, 100, finished=False)
    (tmp_path / "global_step_20_copy").mkdir()
    assert state.latest(tmp_path) is None
    checkpoint(tmp_path, 9)
    newest = checkpoint(tmp_path, 10)
    assert state.latest(tmp_path) == newest


@pytest.mark.parametrize(("keep", "left"), [(1, ["global_step_47"]), (2, ["global_step_40", "global_step_47"])])
def test_an_unfinished_one_takes_no_place(tmp_path: Path, keep: int, left: list[str]) -> None:
    """Killed while it saved step 60, resumed from 40, interrupted at 47: 47 is the newest one to keep."""
    for step in (20, 40, 47):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 60, finished=False)
    state.prune(tmp_path, keep)
    assert names(tmp_path) == left


def test_a_half_removed_one_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        checkpoint(tmp_path, step)
    removed: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append((path / "state.json").exists()))
    state.prune(tmp_path, keep=1)
    assert removed == [False]
