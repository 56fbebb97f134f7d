"""Trackers: the same names and numbers in each, none of them a danger to training."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.config import compose
from megarl.core.errors import ConfigError
from megarl.core.metrics import MetricWriter
from megarl.train import tracking
from megarl.train.tracking import RunInfo, ThreadedTracker, check_trackers, open_trackers

STEPS = [
    (0, {"val/eval-before": 0.25}),
    (1, {"actor/loss": 0.5, "critic/rewards/mean": 1.0}),
    (2, {"actor/loss": 0.25}),
]


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


class Memory:
    """A service that keeps what it is given."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.records: list[tuple[int, dict[str, float], bool]] = []
        self.closed = False
        self.fails_at = fails_at

    def write(self, step: int, metrics: Mapping[str, float], warm_start: bool) -> None:
        if len(self.records) == self.fails_at:
            raise OSError("the service is away")
        self.records.append((step, dict(metrics), warm_start))

    def close(self) -> None:
        self.closed = True


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_tracker_gets_what_the_file_gets(tmp_path: Path) -> None:
    service = Memory()
    writer = MetricWriter(tmp_path, tensorboard=False, trackers=[ThreadedTracker("memory", lambda: service)])
    writer.write(1, {"sft/loss": 3.0})
    for step, metrics in STEPS:
        writer.write(step, metrics)
    writer.close()
    assert service.closed
    assert service.records == [(1, {"sft/loss": 3.0}, True), *((step, metrics, False) for step, metrics in STEPS)]
    assert lines(tmp_path) == [{"step": step, **metrics} for step, metrics, _ in service.records]
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("when", ["at the start", "on the way", "at the end"])
def test_a_failure_is_logged_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    service = Memory(fails_at=1 if when == "on the way" else None)

    def open_service() -> Memory:
        if when == "at the start":
            raise RuntimeError("no login")
        return service

    def away() -> None:
        raise OSError("the service is away")

    if when == "at the end":
        service.close = away  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        tracker = ThreadedTracker("memory", open_service)
        writer = MetricWriter(tmp_path, tensorboard=False, trackers=[tracker])
        for step, metrics in STEPS:
            writer.write(step, metrics)
        if when != "at the end":
            assert tracker.failed.wait(60)
        writer.write(3, {"actor/loss": 0.1})
        writer.close()
    assert [record["step"] for record in lines(tmp_path)] == [0, 1, 2, 3]
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("memory gets no more metrics in this start: ") and ("no login" in message) == (
        when == "at the start"
    )


def test_a_service_that_hangs_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing returns while the service stands still; the end waits for it for a bounded time, what does not fit is
    dropped."""
    release = threading.Event()
    monkeypatch.setattr(tracking, "CLOSE_S", 0.1)

    def hang() -> Memory:
        release.wait()
        return Memory()

    tracker = ThreadedTracker("memory", hang)
    writer = MetricWriter(tmp_path, tensorboard=False, trackers=[tracker])
    for step, metrics in STEPS:
        writer.write(step, metrics)
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert tracker.failed.is_set() and "did not end within" in caplog.text and len(lines(tmp_path)) == len(STEPS)
    release.set()


def test_a_queue_that_is_full_ends_the_tracker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(tracking, "WAITING", 2)

    def hang() -> Memory:
        release.wait()
        return Memory()

    tracker = ThreadedTracker("memory", hang)
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            tracker.write(step, {"a": 1.0}, False)
        tracker.close()
    assert [record.getMessage()[:27] for record in caplog.records] == ["memory gets no more metrics"]
    release.set()


@pytest.mark.timeout(60)
def test_a_queue_that_is_full_at_the_end_delays_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service hangs, and exactly as many records wait as may."""
    monkeypatch.setattr(tracking, "WAITING", 2)
    monkeypatch.setattr(tracking, "CLOSE_S", 0.1)
    tracker = tracking.ThreadedTracker("test", lambda: threading.Event().wait())  # type: ignore[arg-type, return-value]
    for step in range(2):
        tracker.write(step, {}, False)
    tracker.close()
    assert "it did not end within" in caplog.text


def test_the_setting() -> None:
    assert compose(["experiment=quickstart"]).trainer.trackers == ["tensorboard"]
    assert compose(["experiment=quickstart", "trainer.trackers=[]"]).trainer.trackers == []
    with pytest.raises(ConfigError, match="trainer.trackers.*is not one of tensorboard, wandb, mlflow"):
        compose(["experiment=quickstart", "trainer.trackers=[wandd]"])


@pytest.mark.parametrize("left_behind", [False, True])
def test_a_missing_package_is_told_with_its_mend(
    left_behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the directory has a folder of its name, which Python would take for a package."""
    monkeypatch.setitem(tracking.PACKAGES, "wandb", "megarl_no_such_tracker")
    monkeypatch.syspath_prepend(str(tmp_path))
    if left_behind:
        (tmp_path / "megarl_no_such_tracker").mkdir()
    with pytest.raises(ConfigError, match="trainer.trackers has wandb, .* pip install megarl_no_such_tracker"):
        check_trackers(["tensorboard", "wandb"])


# ------------------------------------------------------------------ the real packages


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into its file store, by two starts of one run."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = RunInfo("mine", tmp_path, {"trainer": {"seed": 1}, "empty": {}})
    for part in (STEPS[:2], STEPS[2:]):
        trackers = open_trackers(["mlflow"], run)
        for step, metrics in part:
            trackers[0].write(step, metrics, False)
        trackers[0].close()
        assert not trackers[0].failed.is_set()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking.mlflow_uri(tmp_path))
    [found] = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    assert (
        found.info.run_name == "mine" and found.info.status == "FINISHED" and found.data.params["trainer.seed"] == "1"
    )
    for name in {name for _, metrics in STEPS for name in metrics}:
        history = sorted((entry.step, entry.value) for entry in client.get_metric_history(found.info.run_id, name))
        assert history == [(step, metrics[name]) for step, metrics in STEPS if name in metrics]


@needs("wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into its own files, by two starts of one run; read back from their format."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunInfo("mine", tmp_path, {"trainer": {"seed": 1}})
    for part in (STEPS[:2], STEPS[2:]):
        trackers = open_trackers(["wandb"], run)
        for step, metrics in part:
            trackers[0].write(step, metrics, False)
        trackers[0].close()
        assert not trackers[0].failed.is_set()
        time.sleep(1.1)  # its directories are named by the second
    found = []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        found += [(entry["step"], entry) for entry in history_of(file)]
    assert len(found) == len(STEPS) and len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert [
        (step, {name: entry[name] for name in metrics})
        for (step, entry), (_, metrics) in zip(found, STEPS, strict=True)
    ] == STEPS
    ids = {file.stem.removeprefix("run-") for file in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert ids == {json.loads((tmp_path / tracking.IDS).read_text())["wandb"]}


def history_of(file: Path) -> list[dict[str, Any]]:
    """The history records of W&B's log: seven bytes of its own, then LevelDB's format (blocks of 32 KiB, a header of 7
    bytes a part)."""
    from wandb.proto import wandb_internal_pb2 as records

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = records.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                found.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                )
    return found
