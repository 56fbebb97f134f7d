"""Copies of checkpoints in a remote folder: whole or ignored, fetched with their digests, and refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import CheckpointError, ConfigError
from megarl.weights.checkpoint.training.manifest import complete, finished, unfinished_name
from megarl.weights.checkpoint.training.remote_folder import FETCHED, RemoteFolder, fetch_newer


def checkpoint(run_dir: Path, step: int, text: str = "weights", keep: int = 2) -> Path:
    """A finished checkpoint."""
    written = run_dir / "checkpoints" / unfinished_name(step, 1)
    (written / "actor").mkdir(parents=True)
    (written / "actor" / "0.distcp").write_text(f"{text} of step {step}")
    return complete(written, {"step": step, "phase": "rl"}, {}, {}, keep)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "run"
    (folder / "reference").mkdir(parents=True)
    (folder / "reference" / "config.json").write_text("{}")
    (folder / "resolved.json").write_text('{"a": 1}')
    (folder / "attempt").write_text("3")
    (folder / "store.db").write_text("not copied")
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote/run"


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_is_fetched_where_the_run_is_not(run_dir: Path, tmp_path: Path, url: str) -> None:
    remote = RemoteFolder(url)
    remote.check_writable()
    assert remote.steps() == [] and fetch_newer(run_dir, url) is None
    sent = [checkpoint(run_dir, step) for step in (20, 40)]
    for path in sent:
        remote.put(run_dir, path)
    assert remote.steps() == [20, 40]
    assert fetch_newer(run_dir, url) is None, "this machine has it"
    elsewhere = tmp_path / "elsewhere" / "run"
    elsewhere.mkdir(parents=True)
    (elsewhere / "attempt").write_text("7")
    found = fetch_newer(elsewhere, url)
    assert found == elsewhere / "checkpoints" / "global_step_40" and finished(found.parent) == [found]
    assert json.loads((found / "state.json").read_text()) == json.loads((sent[1] / "state.json").read_text())
    there = contents(elsewhere)
    assert there["checkpoints/global_step_40/actor/0.distcp"] == "weights of step 40"
    assert there["attempt"] == "7", "what is here stays"
    assert there[FETCHED] == "40" and there["resolved.json"] == '{"a": 1}' and there["reference/config.json"] == "{}"
    assert "store.db" not in there and not [name for name in there if "/run" in name or "attempt_" in name]


def test_copies_follow_the_run(run_dir: Path, url: str) -> None:
    """Removed checkpoints lose their copies, and a step that was trained again gets a new one."""
    remote = RemoteFolder(url)
    for step in (20, 40, 60):
        remote.put(run_dir, checkpoint(run_dir, step))
    assert remote.steps() == [40, 60]
    again = checkpoint(run_dir, 60, "other weights")
    remote.put(run_dir, again)
    remote.put(run_dir, again)
    assert "other weights of step 60" in contents(Path(url.removeprefix("file://"))).values()


def test_an_unfinished_copy_is_ignored(run_dir: Path, tmp_path: Path, url: str) -> None:
    remote, folder = RemoteFolder(url), Path(url.removeprefix("file://"))
    remote.put(run_dir, checkpoint(run_dir, 20))
    remote.put(run_dir, checkpoint(run_dir, 40))
    manifest = folder / "global_step_40" / "state.json"
    for cut in (manifest.read_text()[:30], None):
        manifest.unlink() if cut is None else manifest.write_text(cut)
        assert remote.steps() == [20]
        found = fetch_newer(tmp_path / f"other{cut is None}", url)
        assert found is not None and found.name == "global_step_20"


@pytest.mark.parametrize("file", ["actor/0.distcp", "run/resolved.json"])
def test_a_damaged_copy_is_passed_over(run_dir: Path, tmp_path: Path, url: str, file: str) -> None:
    remote, folder = RemoteFolder(url), Path(url.removeprefix("file://"))
    for step in (20, 40):
        remote.put(run_dir, checkpoint(run_dir, step))
    path = folder / "global_step_40" / file
    path.write_text(path.read_text()[::-1])
    found = fetch_newer(tmp_path / "other", url)
    assert found is not None and found.name == "global_step_20"
    path.unlink()
    assert str(fetch_newer(tmp_path / "third", url)).endswith("global_step_20")


def test_a_killed_process_leaves_no_manifest(run_dir: Path, tmp_path: Path, url: str) -> None:
    """The process that copies is killed while it writes the second file; the next one writes a whole copy."""
    path = checkpoint(run_dir, 20)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "megarl.weights.checkpoint.training.remote_folder", str(run_dir), str(path), url]
    killed = """
import os, signal, sys
from fsspec.implementations.local import LocalFileSystem
from megarl.weights.checkpoint.training.remote_folder import main
class Dying(LocalFileSystem):
    def open(self, path, mode="rb", **more):
        if path.endswith("reference/config.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(path, mode, **more)
import fsspec
fsspec.register_implementation("file", Dying, clobber=True)
main(sys.argv[1:])
"""
    done = subprocess.run([sys.executable, "-c", killed, str(run_dir), str(path), url], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    folder = Path(url.removeprefix("file://"))
    assert (folder / "global_step_20" / "actor" / "0.distcp").is_file()
    assert RemoteFolder(url).steps() == [] and fetch_newer(tmp_path / "other", url) is None
    subprocess.run(command, check=True)
    assert RemoteFolder(url).steps() == [20]


def test_what_cannot_be_used_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.remote=nope://x: .*install its package"):
        RemoteFolder("nope://x")
    (tmp_path / "file").write_text("")
    url = f"file://{tmp_path}/file/run"
    with pytest.raises(ConfigError, match=r"trainer.remote=file:.* cannot be written: .*; give a folder"):
        RemoteFolder(url).check_writable()
    path = checkpoint(run_dir, 20)
    command = [sys.executable, "-m", "megarl.weights.checkpoint.training.remote_folder", str(run_dir), str(path), url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "cannot be used" in done.stderr


def test_a_manifest_names_files_inside_its_folder(run_dir: Path, tmp_path: Path, url: str) -> None:
    RemoteFolder(url).put(run_dir, checkpoint(run_dir, 20))
    manifest = Path(url.removeprefix("file://")) / "global_step_20" / "state.json"
    read = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(read | {"files": {"../../../../escaped": [1, "0"]}}))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        RemoteFolder(url).get(tmp_path / "other", 20)
    assert not (tmp_path / "escaped").exists()
