"""A resumed run whose checkpoints or store are damaged, incomplete or gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megarl.buffer.store import Store
from megarl.core.errors import CheckpointError, ConfigError, JobError
from megarl.run.launch import job
from megarl.run.run_dir.resume import check_store_of_run, set_aside_damaged
from megarl.run.run_dir.store_damage import replace_damaged_store
from megarl.weights.checkpoint.training.manifest import (
    LATEST,
    current_attempt,
    fingerprints,
    in_order,
    latest,
    read_manifest,
    read_state,
    write_manifest,
)
from tests.unit.small_job import config_of
from tests.unit.test_resume import finished_checkpoint, list_files


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By megarl; torch logs each save."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("megarl")]


@pytest.mark.parametrize(
    "file",
    [
        "state.json",
        "actor/.metadata",
        "actor/common.pt",
        "actor/__0_0.distcp",
        "critic/common.pt",
        "critic/__0_0.distcp",
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    before, newest = (finished_checkpoint(tmp_path, step) for step in (2, 4))
    shutil.copytree(newest / "actor", newest / "critic")
    list_files(newest, 4)
    folder = tmp_path / "checkpoints"
    set_aside_damaged(tmp_path)
    assert not logged(caplog)
    (newest / file).write_bytes(b"")
    set_aside_damaged(tmp_path)
    assert f"{newest} is damaged" in caplog.text and f"goes on from {before}" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == ["damaged_global_step_4", "global_step_2", LATEST]


@pytest.mark.parametrize("step", [7, 0, 9])
def test_a_step_that_differs_from_the_folder_gives_way_to_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """One flipped bit: the steps behind it would be trained again, or left out."""
    before, newest = (finished_checkpoint(tmp_path, step=n) for n in (4, 8))
    manifest = newest / "state.json"
    manifest.write_text(manifest.read_text().replace('"step": 8', f'"step": {step}'))
    set_aside_damaged(tmp_path, digests=False)
    [line] = [text for text in logged(caplog) if "lists no files" not in text]
    assert f"{newest} is damaged" in line and f"its step is {step}, its folder is global_step_8" in line
    assert f"goes on from {before}" in line and latest(tmp_path / "checkpoints") == before


def test_an_only_checkpoint_of_another_step_is_refused(tmp_path: Path) -> None:
    manifest = finished_checkpoint(tmp_path, step=8) / "state.json"
    manifest.write_text(manifest.read_text().replace('"step": 8', '"step": 0'))
    with pytest.raises(CheckpointError, match="no checkpoint can be read: .*its step is 0, its folder is"):
        set_aside_damaged(tmp_path)


def test_what_was_set_aside_before_is_kept(tmp_path: Path) -> None:
    finished_checkpoint(tmp_path, step=2)
    for _ in range(3):
        (finished_checkpoint(tmp_path, step=4) / "actor/common.pt").write_bytes(b"")
        set_aside_damaged(tmp_path)
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("damaged_*"))
    assert found == ["damaged_global_step_4", "damaged_global_step_4.2", "damaged_global_step_4.3"]


@pytest.mark.parametrize("digests", [True, False])
def test_a_flipped_byte_gives_way_to_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, digests: bool
) -> None:
    """In a place that no header tells of; ``trainer.verify_checkpoints=false`` does not look there."""
    before, newest = (finished_checkpoint(tmp_path, step) for step in (2, 4))
    data = newest / "actor" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[content.index(torch.arange(3.0).numpy().tobytes()) + 5] ^= 1
    data.write_bytes(content)
    set_aside_damaged(tmp_path, digests=digests)
    if digests:
        assert (
            f"{newest} is damaged" in caplog.text
            and "SHA-256" in caplog.text
            and f"goes on from {before}" in caplog.text
        )
    assert newest.is_dir() is not digests


def test_a_stop_ends_the_check_of_digests(tmp_path: Path) -> None:
    """Which takes minutes where checkpoints are large; a stop must not wait for them. Nothing is judged by a check that
    did not end."""
    newest = finished_checkpoint(tmp_path)
    files = fingerprints(newest, [path for path in newest.rglob("*") if path.is_file() and path.name != "state.json"])
    write_manifest(newest, {"phase": "rl", "step": 2}, {}, files)
    with pytest.raises(JobError, match=f"asked to stop while {newest}/.* was compared"):
        set_aside_damaged(tmp_path, stopping=lambda: True)
    assert newest.is_dir()


def test_without_a_whole_checkpoint_nothing_is_lost(tmp_path: Path) -> None:
    only = finished_checkpoint(tmp_path)
    (only / "actor" / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=f"no checkpoint can be read: {only}"):
        set_aside_damaged(tmp_path)
    assert only.is_dir()


@pytest.mark.parametrize("phase", ["", "warm_start"])
def test_a_checkpoint_that_was_being_saved_again_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phase: str
) -> None:
    """``trainer.keep_checkpoints=1``, killed between the two renames: without it the run would begin again."""
    only = finished_checkpoint(tmp_path)
    folder = tmp_path / "checkpoints" / phase
    folder.mkdir(exist_ok=True)
    only.with_name(LATEST).rename(folder / LATEST)
    only.rename(folder / f".{only.name}.old")
    set_aside_damaged(tmp_path, rename=False)
    assert latest(folder) is None, "a job may be alive"
    set_aside_damaged(tmp_path)
    assert latest(folder) == folder / only.name
    assert f"{folder / only.name} was being saved again" in caplog.text


def test_a_newest_checkpoint_without_its_manifest_is_set_aside_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = (finished_checkpoint(tmp_path, step) for step in (2, 4))
    (newest / "state.json").unlink()
    set_aside_damaged(tmp_path)
    assert (
        f"{newest} is damaged" in caplog.text
        and "state.json is missing" in caplog.text
        and f"goes on from {before}" in caplog.text
    )
    assert sorted(path.name for path in before.parent.iterdir()) == ["damaged_global_step_4", "global_step_2", LATEST]
    assert (before.parent / LATEST).read_text() == "2"
    caplog.clear()
    set_aside_damaged(tmp_path)
    assert not logged(caplog)


def test_an_only_checkpoint_without_its_manifest_is_no_new_run(tmp_path: Path) -> None:
    only = finished_checkpoint(tmp_path)
    (only / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=f"no checkpoint can be read: {only}: .*state.json is missing; put its files back"
    ):
        set_aside_damaged(tmp_path)
    assert only.is_dir()


def test_an_older_checkpoint_that_is_half_removed_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a job that was killed while it removed old ones leaves."""
    older, newest = (finished_checkpoint(tmp_path, step) for step in (2, 4))
    (older / "state.json").unlink()
    set_aside_damaged(tmp_path)
    assert latest(newest.parent) == newest and older.is_dir() and not logged(caplog)


@pytest.mark.parametrize("text", ["6", "", "x"])
def test_a_name_of_the_newest_that_counts_for_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Of a checkpoint that is gone; a run of which it was the only one does not begin again without a word."""
    found = finished_checkpoint(tmp_path, 4)
    (found.parent / LATEST).write_text(text)
    set_aside_damaged(tmp_path)
    assert f"{found.parent / LATEST} names {text!r}" in caplog.text and f"goes on from {found}" in caplog.text
    shutil.rmtree(found)
    with pytest.raises(
        CheckpointError, match=f"{found.parent / LATEST} names {text!r}.*put it back, or remove {found.parent}"
    ):
        set_aside_damaged(tmp_path)


def test_an_older_name_of_the_newest_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed between the checkpoint's rename and this file's."""
    for step in (2, 4):
        (finished_checkpoint(tmp_path, step).parent / LATEST).write_text("2")
    set_aside_damaged(tmp_path)
    assert not logged(caplog)


@pytest.mark.parametrize("files", ["absent", "empty"])
def test_a_manifest_without_files_is_not_taken_as_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: str
) -> None:
    before, newest = (finished_checkpoint(tmp_path, step) for step in (2, 4))
    manifest = read_manifest(newest) | {"files": {}}
    if files == "absent":
        del manifest["files"]
    (newest / "state.json").write_text(json.dumps(manifest))
    set_aside_damaged(tmp_path, digests=False)
    assert f"{newest / 'state.json'} lists no files" in caplog.text and newest.is_dir(), (
        "who has said so takes it unverified"
    )
    set_aside_damaged(tmp_path)
    assert f"{newest} is damaged" in caplog.text and "trainer.verify_checkpoints=false" in caplog.text
    assert latest(before.parent) == before


def test_a_warm_start_that_is_over_may_be_damaged(tmp_path: Path) -> None:
    """Its checkpoints are removed when the first later one is there; a job that was killed then leaves half of them."""
    rest = finished_checkpoint(tmp_path)
    moved = tmp_path / "checkpoints" / "warm_start" / rest.name
    moved.parent.mkdir()
    rest.rename(moved)
    rest.with_name(LATEST).rename(moved.with_name(LATEST))
    shutil.rmtree(moved / "actor")
    with pytest.raises(CheckpointError, match=f"no checkpoint can be read: {moved}"):
        set_aside_damaged(tmp_path)
    finished_checkpoint(tmp_path)
    set_aside_damaged(tmp_path)


def test_folders_with_other_numerals_are_no_checkpoints(tmp_path: Path) -> None:
    newest = finished_checkpoint(tmp_path)
    for name in ("²", "٣"):
        (tmp_path / "checkpoints" / f"global_step_{name}").mkdir()
    assert in_order(tmp_path / "checkpoints") == [newest]


@pytest.mark.parametrize("content", ["²".encode(), "٣".encode(), b"\xff", b"9" * 5000])
def test_an_attempt_that_is_no_number_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "attempt").write_bytes(content)
    with pytest.raises(JobError, match=f"{tmp_path}/attempt has no number"):
        current_attempt(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "2", "phase": "rl"}', "[" * 100000])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    state = finished_checkpoint(tmp_path) / "state.json"
    state.write_text(text)
    with pytest.raises(CheckpointError, match=f"{state} is damaged: "):
        read_state(state.parent)


def test_a_store_without_the_runs_steps_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    finished_checkpoint(tmp_path, 2)
    store = Store(config.store.url)
    store.journal.record_step(1, {})
    with pytest.raises(ConfigError, match=r"store\.url=.*1 of the 2 steps.*the first is 2"):
        check_store_of_run(config, tmp_path, store)
    store.journal.record_step(2, {})
    check_store_of_run(config, tmp_path, store)
    store.close()


def test_a_store_that_lost_its_last_steps_takes_the_run_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a power cut leaves it: to the newest checkpoint whose steps are all there."""
    config = config_of(tmp_path)
    for step in (0, 2, 4, 6):
        finished_checkpoint(tmp_path, step)
    store = Store(config.store.url)
    store.journal.record_step(2, {})
    with pytest.raises(ConfigError, match=r"5 of the 6 steps.*the first is 1"):  # step 0 is no place to go back to
        check_store_of_run(config, tmp_path, store)
    for step in (1, 3):
        store.journal.record_step(step, {})
    check_store_of_run(config, tmp_path, store)
    folder = tmp_path / "checkpoints"
    assert latest(folder) == folder / "global_step_2"
    assert sorted(path.name for path in folder.glob("uncovered_*")) == [
        "uncovered_global_step_4",
        "uncovered_global_step_6",
    ]
    assert f"THE RUN GOES BACK to {folder}/global_step_2" in caplog.text and "3 of the 6 steps" in caplog.text
    store.close()


def test_the_store_of_another_run_is_not_touched(tmp_path: Path) -> None:
    """It has the run's first steps, so the run could seem to have lost its last ones."""
    config = config_of(tmp_path)
    job.fill_store(config, {}, 1, config)
    for step in (0, 2, 4):
        finished_checkpoint(tmp_path, step)
    other = config_of(tmp_path / "other", f"store.url=sqlite:///{tmp_path}/other.db")
    (tmp_path / "other").mkdir(exist_ok=True)
    job.fill_store(other, {}, 1, other)
    store = Store(other.store.url, attempt=1)
    for step in (1, 2):
        store.journal.record_step(step, {})
    with pytest.raises(ConfigError, match="other.db is the store of another run"):
        here = config_of(tmp_path, f"store.url={other.store.url}")
        job.fill_store(here, {}, 2, here)
    assert latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "global_step_4"
    store.journal.record_step(3, {})  # no later attempt has begun there
    store.close()


def test_a_damaged_store_is_set_aside_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new one has the steps of metrics.jsonl: the run goes on from its newest checkpoint."""
    config = config_of(tmp_path)
    newest = finished_checkpoint(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in (1, 3):  # the line of step 2 found no room on the disk
            metrics = {"training/global_step": step, "reward": step / 2}
            file.write(
                json.dumps({"step": step, "sft/loss": 1.0}) + "\n" + json.dumps({"step": step, **metrics}) + "\n"
            )
        file.write('{"step": 4, "tra')
    store = Store(config.store.url)
    for step in range(1, 4):
        store.journal.record_step(step, {"training/global_step": step, "reward": step / 2})
    whole = store.journal.steps()
    store.close()
    path = tmp_path / "store.db"
    damaged = bytearray(path.read_bytes())
    page = damaged.index(b'"reward":1.0') // 4096 * 4096
    damaged[page : page + 100] = b"\xff" * 100
    path.write_bytes(damaged)
    replace_damaged_store(config, rename=False)
    assert f"the store {path} is damaged: " in caplog.text and path.read_bytes() == damaged
    replace_damaged_store(config)
    assert f"THE STORE {path} WAS DAMAGED" in caplog.text and "the 2 steps of metrics.jsonl" in caplog.text
    assert (tmp_path / "store.db.damaged").read_bytes() == damaged
    store = Store(config.store.url)
    assert store.journal.steps() == [whole[0], (2, {}), whole[2]]
    check_store_of_run(config, tmp_path, store)
    assert latest(newest.parent) == newest
    store.close()
    caplog.clear()
    replace_damaged_store(config)
    assert not caplog.records


def test_an_emptied_store_is_set_aside_where_the_run_has_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    path, metrics = tmp_path / "store.db", tmp_path / "metrics.jsonl"
    path.touch()
    replace_damaged_store(config)
    assert not caplog.records, "a start that was killed leaves such a file"
    lines = [b"{}", b"123", b"null", b"\xff\xfe", b'{"step": [], "training/global_step": []}', b"[" * 100000]
    path.write_bytes(b"")
    metrics.write_bytes(b"\n".join([*lines, b'{"step": 1, "training/global_step": 1, "reward": 0.5}', b""]))
    replace_damaged_store(config)
    assert f"THE STORE {path} WAS DAMAGED: it has 0 bytes" in caplog.text
    store = Store(config.store.url)
    assert [step for step, _ in store.journal.steps()] == [1]
    store.close()
