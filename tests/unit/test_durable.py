"""What is written appears whole or not at all, wherever its writer is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core import durable
from megarl.tasks import read_rows, write_rows
from megarl.weights.checkpoint.formats.output import MANIFEST, OutputDirectory
from megarl.weights.checkpoint.formats.overwrite import check_target
from tests.kills import every_kill
from tests.stores import make_task


def folder_of(path: Path, text: str) -> Path:
    (path / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (path / name).write_text(text)
    return path


def texts(path: Path) -> set[str]:
    assert {str(p.relative_to(path)) for p in path.rglob("*")} == {"a", "inner", "inner/b"}
    return {(path / name).read_text() for name in ("a", "inner/b")}


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path, found = tmp_path / "file", set()

    def do() -> Callable[[], object]:
        path.write_text("old")
        return lambda: durable.write_text(path, "new")

    for _ in every_kill(do):
        found.add(path.read_text())
    assert found == {"old", "new"}


def test_a_folder_is_the_old_one_or_the_new_one_after_a_start(tmp_path: Path) -> None:
    root, found = tmp_path / "root", set()
    target = root / "target"

    def do() -> Callable[[], object]:
        shutil.rmtree(root, ignore_errors=True)
        folder_of(target, "old")
        new = folder_of(root / "new", "new")
        return lambda: durable.replace_directory(new, target)

    for _ in every_kill(do):
        for moved in durable.moved_aside(root):
            durable.recover_directory(moved)
        [text] = texts(target)
        found.add(text)
        assert {path.name for path in root.iterdir()} <= {"target", "new"}
    assert found == {"old", "new"}


def test_a_rename_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, new, replace = folder_of(tmp_path / "target", "old"), folder_of(tmp_path / "new", "new"), os.replace

    def refused(source: Path, to: Path) -> None:
        if source == new:
            raise OSError(28, "No space left on device")
        replace(source, to)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="No space left"):
        durable.replace_directory(new, target)
    assert texts(target) == {"old"} and not durable.moved_aside(tmp_path)


def test_a_conversion_that_replaces_a_target_loses_neither(tmp_path: Path) -> None:
    """Between the renames the target is missing; the next command puts the old one back before it begins."""
    root, found = tmp_path / "root", set()
    target = root / "target"

    def manifest(text: str) -> dict[str, object]:
        return {"text": text, "tensors": {}, "files": {}, "beside": []}

    def do() -> Callable[[], object]:
        shutil.rmtree(root, ignore_errors=True)
        target.mkdir(parents=True)
        (target / MANIFEST).write_text(json.dumps(manifest("old")))
        with OutputDirectory(target, "job") as output:
            output.keep([])
        return lambda: output.commit(manifest("new"))

    for _ in every_kill(do):
        check_target(target, [], overwrite=True)
        found.add(json.loads((target / MANIFEST).read_text())["text"])
    assert found == {"old", "new"}


def test_generated_rows_are_the_old_ones_or_the_new_ones(tmp_path: Path) -> None:
    path, found = tmp_path / "train.parquet", set()

    def do() -> Callable[[], object]:
        write_rows(path, [make_task(i) for i in range(2)])
        return lambda: write_rows(path, [make_task(i) for i in range(3)])

    for _ in every_kill(do):
        found.add(len(read_rows(path)))
    assert found == {2, 3}
