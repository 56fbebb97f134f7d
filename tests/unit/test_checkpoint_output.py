"""A target appears whole or not at all; what an interrupted run finished is kept, if it is still what was written."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert import convert, targets
from megarl.weights.checkpoint.convert.convert import (
    ConversionSummary,
    Settings,
    convert_hf_to_megatron,
    convert_megatron_to_hf,
)
from megarl.weights.checkpoint.formats.output import MANIFEST
from tests.unit.reshard_cases import qwen3_config
from tests.unit.reshard_oracle import random_hf
from tests.unit.test_checkpoint_convert import write_hf

SMALL = Settings(progress=False, file_bytes=2000, workers=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = qwen3_config()
    return write_hf(tmp_path / "hf", config, random_hf(config))


class Killed(BaseException):
    """The process ends here."""


def interrupted(
    monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, after: int, settings: Settings = SMALL
) -> None:
    """Convert, but die in the middle of the file after ``after`` finished ones."""
    write, count = targets.DistTarget.write, 0

    def dying(self: Any, path: Path, file: Any, blocks: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            (path / file.name).write_bytes(b"half of it")
            raise Killed
        return write(self, path, file, blocks)

    with monkeypatch.context() as patch:
        patch.setattr(targets.DistTarget, "write", dying)
        with pytest.raises(Killed):
            convert_hf_to_megatron(source, target, settings)
    assert not target.exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_second_run_goes_on_behind_the_finished_files(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    whole = convert_hf_to_megatron(source, tmp_path / "whole", SMALL)
    assert whole.files > 4 and whole.kept_files == 0
    interrupted(monkeypatch, source, tmp_path / "out", after=3)
    assert convert_hf_to_megatron(source, tmp_path / "out", SMALL).kept_files == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out", "whole"]


def test_killed_between_the_last_file_and_the_manifest(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    whole = convert_hf_to_megatron(source, tmp_path / "whole", SMALL)

    def dying(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(convert, "manifest_of", dying)
        with pytest.raises(Killed):
            convert_hf_to_megatron(source, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    assert convert_hf_to_megatron(source, tmp_path / "out", SMALL).kept_files == whole.files
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "journal"])
def test_finished_files_are_not_trusted_blindly(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, damage: str
) -> None:
    convert_hf_to_megatron(source, tmp_path / "whole", SMALL)
    interrupted(monkeypatch, source, tmp_path / "out", after=3)
    partial = tmp_path / ".out.partial"
    file = partial / "__0_1.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "flipped":
        file.write_bytes(data)
    elif damage == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        journal = partial / "journal.jsonl"
        journal.write_text(journal.read_text()[:-20])  # the last line was being written
    assert convert_hf_to_megatron(source, tmp_path / "out", SMALL).kept_files == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", ["dtype", "source", "cut"])
def test_files_of_another_job_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, change: str
) -> None:
    interrupted(monkeypatch, source, tmp_path / "out", after=3)
    settings = SMALL
    if change == "dtype":
        settings = Settings(progress=False, file_bytes=2000, workers=1, dtype=torch.bfloat16)
    elif change == "cut":
        settings = Settings(progress=False, file_bytes=2500, workers=1)
    else:
        config = qwen3_config()
        shutil.rmtree(source)
        write_hf(source, config, random_hf(config, seed=9))
    convert_hf_to_megatron(source, tmp_path / "whole", settings)
    assert convert_hf_to_megatron(source, tmp_path / "out", settings).kept_files == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_existing_target_is_refused_or_replaced_whole(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"out exists; give another directory, or --overwrite"):
        convert_hf_to_megatron(source, target, SMALL)
    assert contents(target) == {"mine.txt": b"keep me"}
    (target / "mine.txt").unlink()
    for _ in range(2):
        convert_hf_to_megatron(source, target, Settings(progress=False, overwrite=True))
    assert (target / MANIFEST).is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_a_failed_overwrite_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    convert_hf_to_megatron(source, target, SMALL)
    before = contents(target)

    def full(*_: object) -> ConversionSummary:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(targets.DistTarget, "write", full)
    with pytest.raises(OSError, match="No space left"):
        convert_hf_to_megatron(source, target, Settings(progress=False, overwrite=True, dtype=torch.bfloat16))
    assert contents(target) == before


def test_two_processes_do_not_write_one_target(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    with (partial / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing"):
            convert_hf_to_megatron(source, tmp_path / "out", SMALL)


def test_a_full_disk_is_told_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"0\.0 GiB free, expected .* GiB or more for out; make room"):
        convert_hf_to_megatron(source, tmp_path / "out", SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("kind", ["megatron", "hf"])
def test_verify_reads_what_is_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, kind: str
) -> None:
    """A bit that changes after the writer's back: without --verify it goes unseen, with it it is named."""
    convert_hf_to_megatron(source, tmp_path / "meg", SMALL)
    target = targets.DistTarget if kind == "megatron" else targets.HFTarget
    write = target.write

    def flipping(self: Any, path: Path, file: Any, blocks: Any) -> Any:
        found = write(self, path, file, blocks)
        data = bytearray((path / file.name).read_bytes())
        data[data.index(b"\x3f", len(data) // 2)] ^= 1  # an exponent byte of the elements
        (path / file.name).write_bytes(data)
        return found

    monkeypatch.setattr(target, "write", flipping)

    def run(folder: str, **more: Any) -> ConversionSummary:
        settings = Settings(progress=False, **more)
        if kind == "megatron":
            return convert_hf_to_megatron(source, tmp_path / folder, settings)
        return convert_megatron_to_hf(tmp_path / "meg", tmp_path / folder, settings=settings)

    run("unseen")
    with pytest.raises(
        CheckpointError, match=r"differs from its source(.|\n)*model\.layers\.\d.* in .*: source \w{16}, target \w{16}"
    ):
        run("out", verify=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(target, "write", write)
    assert run("out", verify=True).kept_files == 0


def test_the_manifest_says_where_everything_is(source: Path, tmp_path: Path) -> None:
    convert_hf_to_megatron(source, tmp_path / "out", SMALL)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["family"] == "qwen3" and manifest["kind"] == "megatron" and manifest["source"] == str(source)
    assert manifest["files"] == {f.name: f.stat().st_size for f in (tmp_path / "out").glob("__[0-9]*.distcp")}
    entry = manifest["tensors"]["model.layers.2.mlp.up_proj.weight"]
    assert entry["shape"] == [24, 8] and entry["dtype"] == "float32" and set(entry["files"]) <= manifest["files"].keys()
