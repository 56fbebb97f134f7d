"""Which checkpoints count and which go, from the folder alone: what a job that died at any line may have left."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import CheckpointError
from megarl.core.metrics import best_step
from megarl.weights.checkpoint.training import disk_space as disk_space
from megarl.weights.checkpoint.training import manifest, state
from tests.kills import every_kill
from tests.parallel.grid import run_grid


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


def test_the_best_one_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step in (20, 40, 60, 80):
        checkpoint(tmp_path, step)
    state.prune(tmp_path, 1, best=20)
    assert names(tmp_path) == ["global_step_20", "global_step_80"]
    disk_space.free_space(tmp_path, 2**62, 1, refuse=False, best=20)
    assert names(tmp_path) == ["global_step_20", "global_step_80"]


@pytest.mark.parametrize(("name", "best"), [("val/accuracy", 2), ("val/loss", 4), ("val/score", None)])
def test_the_best_step_is_the_first_with_the_best_finite_value(tmp_path: Path, name: str, best: int | None) -> None:
    values = {0: (0.9, 0.1), 1: (0.1, 3.0), 2: (0.5, 2.0), 3: (0.5, math.nan), 4: (0.2, 1.0), 5: (0.3, 2.0)}
    lines = [json.dumps({"step": step, "val/accuracy": a, "val/loss": loss}) for step, (a, loss) in values.items()]
    earlier = json.dumps({"step": 1, "val/accuracy": 1.0})  # written again after a resume
    (tmp_path / "metrics.jsonl").write_text("\n".join([earlier, *lines, '{"step": 2, "val/accuracy": 9']))
    assert best_step(tmp_path, name, {1, 2, 3, 4, 5}) == best
    assert best_step(tmp_path / "none", name, {1}) is None


def test_a_half_removed_one_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        checkpoint(tmp_path, step)
    removed: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append((path / "state.json").exists()))
    state.prune(tmp_path, keep=1)
    assert removed == [False]


def test_what_a_job_left_unfinished_is_removed_but_not_a_later_attempts(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    for name in (
        "global_step_6.attempt_1",
        "global_step_6.attempt_2",
        "global_step_6.attempt_3",
        "global_step_5.attempt_2.bak",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")  # killed between the manifest and the new name
    assert state.latest(tmp_path) == tmp_path / "global_step_4"
    state.prune(tmp_path, keep=1, attempt=2)
    assert names(tmp_path) == ["global_step_4", "global_step_5.attempt_2.bak", "global_step_6.attempt_3"]


FILES = {"actor/__0_0.distcp": 300, "actor/.metadata": 40, "rng_0.json": 7, "empty": 0}


def written(folder: Path) -> Path:
    """A checkpoint of some bytes whose manifest lists its files."""
    for name, size in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(i % 251 for i in range(size)))
    files = manifest.fingerprints(folder, [folder / name for name in FILES])
    manifest.write_manifest(folder, {"phase": "rl", "step": 3}, {"attempt": 1}, files)
    return folder


@settings(max_examples=50)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder))
        assert manifest.fault_of_files(path) is None
        name = data.draw(st.sampled_from([name for name, size in FILES.items() if size]))
        content = bytearray((path / name).read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (path / name).write_bytes(content)
        fault = manifest.fault_of_files(path)
        assert fault is not None and fault.startswith(f"{path / name} has SHA-256 ")
        assert manifest.fault_of_files(path, digests=False) is None


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_of_another_size_is_found_without_reading(tmp_path: Path, name: str) -> None:
    path = written(tmp_path) / name
    with path.open("ab") as file:
        file.write(b"x")
    assert (
        manifest.fault_of_files(tmp_path, digests=False)
        == f"{path} has {FILES[name] + 1} bytes, written were {FILES[name]}"
    )
    path.unlink()
    assert manifest.fault_of_files(tmp_path, digests=False) == f"{path} is missing, written were {FILES[name]}"


def test_a_manifest_holds_the_state_and_more(tmp_path: Path) -> None:
    written(tmp_path)
    assert manifest.read_state(tmp_path) == {"phase": "rl", "step": 3}
    assert manifest.read_manifest(tmp_path)["made"] == {"attempt": 1}
    (tmp_path / "state.json").write_text('{"phase": "rl", "step": 3, "files": {"a": 1}}')
    with pytest.raises(CheckpointError, match="its list of files cannot be read"):
        manifest.fault_of_files(tmp_path)


# ---------------------------------------------------------------- a save that is killed


def content_of(folder: Path) -> str:
    return (folder / "actor" / "__0_0.distcp").read_text()


def save_of(folder: Path, step: int, content: str, keep: int) -> Callable[[], object]:
    """All that rank 0 does once the files of a checkpoint are written."""
    target = folder / manifest.unfinished_name(step, 1)
    (target / "actor").mkdir(parents=True)
    (target / "actor" / "__0_0.distcp").write_text(content)
    return lambda: manifest.complete(target, {"phase": "rl", "step": step}, {}, {}, keep)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("step", [4, 6])
def test_a_save_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, step: int, keep: int) -> None:
    """The newest checkpoint is of step 4: it is saved again, or the next one is."""
    run_dir = tmp_path / "run"
    folder = run_dir / "checkpoints"

    def prepare() -> Callable[[], object]:
        shutil.rmtree(run_dir, ignore_errors=True)
        save_of(folder, 2, "first", keep)()
        save_of(folder, 4, "before", keep)()
        return save_of(folder, step, "after", keep)

    found = set()
    for call in every_kill(prepare):
        manifest.recover(folder)
        newest = state.latest(folder)
        assert newest is not None and manifest.fault_of_files(newest) is None, (
            f"killed before call {call}: {names(folder)}"
        )
        assert manifest.read_state(newest)["step"] == (4 if content_of(newest) == "before" else step)
        found.add(content_of(newest))
        save_of(folder, 8, "next", keep)()
        assert len(manifest.finished(folder)) == min(keep, 2) and names(folder)[-1] == manifest.LATEST, names(folder)
    assert found == {"before", "after"}


def test_all_files_and_folders_are_on_the_disk_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the manifest before the checkpoint has its name."""
    synced: list[Path] = []
    when_renamed: dict[str, list[Path]] = {}
    fsync, replace = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        when_renamed[Path(target).name] = synced[:]
        replace(source, target)

    action = save_of(tmp_path, 4, "content", keep=1)
    target = tmp_path / manifest.unfinished_name(4, 1)
    (target / "huggingface").mkdir()
    (target / "huggingface" / "config.json").write_text("{}")
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    everything = {target, *target.rglob("*")}
    action()
    assert everything <= set(when_renamed["state.json"])
    assert target in when_renamed["global_step_4"][len(when_renamed["state.json"]) :]
    assert synced[-1] == tmp_path


def sees(rank: int, folder: str) -> tuple[Path | None, Path | None, int]:
    """Runs in each rank, on a list of names of its own, as a network file system may show it."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    own = Path(folder) / str(rank)
    first, second = state.newest(own / "rl", own / "warm_start"), state.newest(own / "none", own / "warm_start")
    with pytest.raises(CheckpointError, match=r"0/warm_start/global_step_1/state\.json is damaged"):
        state.manifest_of(own / "warm_start" / "global_step_1")
    return first, second, state.manifest_of(own / "rl" / "global_step_4")["step"]


def test_all_ranks_go_on_from_the_checkpoint_that_rank_0_finds(tmp_path: Path) -> None:
    """On rank 1 a later one is there as well, the newest of rank 0 has no manifest, and a damaged one is whole."""
    for rank, steps in enumerate([(2, 4), (2, 4, 6)]):
        for step in steps:
            checkpoint(tmp_path / str(rank) / "rl", step)
        checkpoint(tmp_path / str(rank) / "warm_start", 1)
    (tmp_path / "1" / "rl" / "global_step_4" / "state.json").unlink()
    (tmp_path / "0" / "rl" / "global_step_4" / "state.json").write_text('{"phase": "rl", "step": 4}')
    (tmp_path / "1" / "warm_start" / "global_step_1" / "state.json").write_text('{"phase": "rl", "step": 1}')
    rank_0 = tmp_path / "0"
    expected = rank_0 / "rl" / "global_step_4", rank_0 / "warm_start" / "global_step_1", 4
    assert run_grid(2, sees, str(tmp_path), timeout_s=60) == [expected, expected]
