"""Trackers in addition to TensorBoard: W&B and MLflow, with the same metrics and names. They never stop or delay
training.

Each runs in a separate thread, so a slow service (a hanging network, retries) delays no step. The first failure is
logged and ends the tracker until the job restarts; ``metrics.jsonl`` is always complete.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.durable import write_text
from megarl.core.errors import ConfigError
from megarl.core.metrics import Tracker

log = logging.getLogger(__name__)

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Tracker -> package to import for it; mlflow-skinny provides mlflow too."""
IDS = "trackers.json"
"""File in the run's directory with the trackers' run ids, which a resumed job continues."""
WAITING = 10_000
"""Maximum number of queued records; further ones are dropped."""
CLOSE_S = 30.0
"""Seconds that a job waits at its end for a tracker to send queued records."""


class RunInfo(NamedTuple):
    """Facts about the run for a tracker."""

    name: str
    folder: Path
    settings: Mapping[str, Any]


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in names:
        spec = importlib.util.find_spec(PACKAGES[name])
        if spec is None or spec.origin is None:  # a folder of that name left by a run is not a package
            raise ConfigError(
                f"trainer.trackers has {name}, but the package {PACKAGES[name]} is not installed; pip install "
                f"{PACKAGES[name]}, or leave it out"
            )


def open_trackers(names: Sequence[str], run: RunInfo) -> list[ThreadedTracker]:
    """Open the trackers in ``names`` that ``TRACKERS`` has; ``metrics.MetricWriter`` writes TensorBoard."""
    return [ThreadedTracker(name, lambda make=TRACKERS[name]: make(run)) for name in names if name in TRACKERS]  # type: ignore[misc]


class ThreadedTracker:
    """A tracker in a separate thread: calls return immediately and raise nothing."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self._open = open_tracker
        self._records: queue.Queue[tuple[int, dict[str, float], bool] | None] = queue.Queue(WAITING)
        # A daemon thread: a hanging service keeps no process alive.
        self._thread = threading.Thread(target=self._serve, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float], warm_start: bool) -> None:
        """Queue a step's metrics; return immediately."""
        if not self.failed.is_set():
            try:
                self._records.put_nowait((step, dict(metrics), warm_start))
            except queue.Full:
                self._fail(f"it has not taken the last {WAITING} records")

    def close(self) -> None:
        """Send queued records, for ``CLOSE_S`` at most."""
        if not self.failed.is_set():
            with suppress(queue.Full):  # a full queue: the thread hangs
                self._records.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._fail(f"it did not end within {CLOSE_S:.0f} s")

    def _serve(self) -> None:
        try:
            tracker = self._open()
            while (record := self._records.get()) is not None:
                tracker.write(*record)
            tracker.close()
        except Exception as error:  # no error of a service, of any type, may stop training
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.failed.is_set():
                return
            log.warning(
                "%s gets no more metrics in this start: %s; training continues, and metrics.jsonl has everything",
                self.name,
                reason,
            )
            self.failed.set()


class _WandB:
    """W&B. The step is a separate axis, because W&B's counter never goes back and a resumed job does."""

    def __init__(self, run: RunInfo) -> None:
        wandb: Any = importlib.import_module("wandb")
        known = _known_id(run.folder, "wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megarl"),
            name=run.name,
            id=known,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off"),
        )
        _keep_id(run.folder, "wandb", self._run.id)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("sft/*", step_metric="warm_start_step")

    def write(self, step: int, metrics: Mapping[str, float], warm_start: bool) -> None:
        self._run.log({**metrics, "warm_start_step" if warm_start else "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow through its client, which has no process-wide state. Without MLFLOW_TRACKING_URI it writes files in the
    run's directory."""

    def __init__(self, run: RunInfo) -> None:
        tracking: Any = importlib.import_module("mlflow.tracking")
        entities: Any = importlib.import_module("mlflow.entities")
        self._metric: Any = entities.Metric
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # required by 3.17; mlflow-skinny has no other local store
        self._client: Any = tracking.MlflowClient(tracking_uri=mlflow_uri(run.folder))
        known = _known_id(run.folder, "mlflow")
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megarl")
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            known = self._client.create_run(experiment, run_name=run.name).info.run_id
            _keep_id(run.folder, "mlflow", known)
            for key, value in _flat(run.settings):
                self._client.log_param(known, key, str(value)[:500])
        else:
            self._client.update_run(known, status="RUNNING")
        self._id = known

    def write(self, step: int, metrics: Mapping[str, float], warm_start: bool) -> None:
        now = int(time.time() * 1000)
        # Characters that MLflow allows in names; some of our names contain the run's data sources.
        batch = [self._metric(re.sub(r"[^\w\-. /:]", "_", name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(batch), 1000):  # MLflow's limit per request
            self._client.log_batch(self._id, metrics=batch[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_uri(folder: Path) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()


TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {"wandb": _WandB, "mlflow": _MLflow}


def _flat(settings: Mapping[str, Any], where: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        found += _flat(value, f"{where}{key}.") if isinstance(value, Mapping) and value else [(f"{where}{key}", value)]
    return found


_IDS_LOCK = threading.Lock()


def _known_id(folder: Path, name: str) -> str | None:
    with _IDS_LOCK:
        return _ids(folder).get(name)


def _keep_id(folder: Path, name: str, value: str) -> None:
    with _IDS_LOCK:
        path = folder / IDS
        write_text(path, json.dumps({**_ids(folder), name: value}))


def _ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDS).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
