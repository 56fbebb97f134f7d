"""A run's SQLite store that was damaged: made again before a job reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.core.config import Config
from megarl.explore.store import Store, repair, sqlite_file
from megarl.explore.store.database import is_pending

log = logging.getLogger(__name__)


def rebuild_damaged_store(config: Config, *, rename: bool = True, stopping: Callable[[], bool] = lambda: False) -> None:
    """Make a damaged SQLite store again from the rows that can be read and the run's ``metrics.jsonl``, with a warning;
    the damaged file is kept. Without ``rename`` there is only the warning.

    Raises:
        ConfigError: ``store.url`` cannot be read.
        JobError: ``stopping`` returned True before all rows were read; the damaged file is where it was.
    """
    if is_pending(config.store.url):
        return
    path = sqlite_file(config.store.url)
    metrics = Path(config.run.dir) / "metrics.jsonl"
    if path is None or (fault := _emptied(path, metrics) or repair.fault(path, stopping)) is None:
        return
    if not rename:
        log.warning("the store %s is damaged: %s; the next start makes it again from what can be read", path, fault)
        return
    aside = repair.rebuild(path, stopping)
    restored = _restore_steps(config.store.url, metrics)
    log.warning(
        "THE STORE %s WAS DAMAGED: %s. It is now %s, and a new one has what could be read of it, and %d steps that "
        "only metrics.jsonl had. Answers of earlier steps may be missing in the report; training loses nothing, since "
        "it goes on from a checkpoint.",
        path,
        fault,
        aside,
        restored,
    )


def _emptied(path: Path, metrics: Path) -> str | None:
    """The fault of a file without a byte in a run that has steps; before the first step a killed start leaves such a
    file."""
    return "it has 0 bytes" if path.is_file() and path.stat().st_size == 0 and _written(metrics) else None


def _restore_steps(url: str, metrics: Path) -> int:
    """Record the steps that ``metrics`` has and the store has not; returns how many."""
    store = Store(url)
    try:
        recorded = {step for step, _ in store.steps()}
        lost = {step: found for step, found in _written(metrics).items() if step not in recorded}
        for step, found in lost.items():
            store.record_step(step, found)
        return len(lost)
    finally:
        store.close()


def _written(metrics: Path) -> dict[int, dict[str, Any]]:
    """Steps of training and what was measured; a repeated one as it was the last time."""
    found: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.is_file() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half a line, of a process that was killed
        step = record.pop("step", None) if isinstance(record, dict) else None
        if type(step) is int and record.get("training/global_step") == step:
            found[step] = record
    return found
