"""``megarl doctor --bundle``: what another person needs, no secret, no weights, bounded."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from megarl.core.errors import ConfigError
from megarl.run.report.doctor import BEGIN_BYTES, END_BYTES, write_bundle


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for attempt in (1, 2, 3):
        logs = run / "logs" / f"attempt_{attempt}"
        logs.mkdir(parents=True)
        (logs / "explorer.log").write_text(f"attempt {attempt}")
    (run / "logs" / "attempt_3" / "trainer_0.log").write_text("first\n" + "x" * 2**20 + "\nlast")
    (run / "resolved.json").write_text('{"store": {"url": "postgresql://me:hunter2@host/db"}}')
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "store.db").write_text("rows")
    (run / "hf").mkdir()
    (run / "hf" / "model.safetensors").write_text("weights")
    return run


def test_it_has_logs_settings_and_versions_and_no_secret(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_JOB_KEY", "hunter2")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    target = write_bundle(run_dir, "ready", tmp_path / "bundle.zip")
    with zipfile.ZipFile(target) as bundle:
        texts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    logs = {f"logs/attempt_{n}/explorer.log" for n in (2, 3)} | {"logs/attempt_3/trainer_0.log"}
    beside = {"doctor.txt", "packages.txt", "environment.txt", "files.txt", "resolved.json", "metrics.jsonl"}
    assert set(texts) == logs | beside
    assert "hunter2" not in "".join(texts.values())
    assert "SLURM_JOB_ID=7" in texts["environment.txt"] and "MEGARL_JOB_KEY=***" in texts["environment.txt"]
    assert "torch==" in texts["packages.txt"] and "hf/model.safetensors" in texts["files.txt"]
    long = texts["logs/attempt_3/trainer_0.log"]
    assert long.startswith("first\n") and long.endswith("\nlast") and "bytes are left out" in long
    assert len(long) < BEGIN_BYTES + END_BYTES + 100


def test_another_folder_or_a_file_that_is_there_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no resolved.json"):
        write_bundle(tmp_path, "", tmp_path / "bundle.zip")
    (tmp_path / "bundle.zip").touch()
    with pytest.raises(ConfigError, match="exists already"):
        write_bundle(run_dir, "", tmp_path / "bundle.zip")
