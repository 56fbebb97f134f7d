"""Metrics under verl's names and their destinations (TensorBoard, jsonl, trackers, console); phases of a process."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from megarl.core.durable import write_text
from megarl.core.processes import heartbeat

log = logging.getLogger(__name__)

Sums = Mapping[str, tuple[float, float]]
"""Metric name -> (sum, count), which ranks and micro-batches add up. For ``max:name`` the first number is a maximum."""


def mean_of_sums(parts: Iterable[Sums]) -> dict[str, float]:
    """Means (or maxima) over all parts; metrics with count 0 are left out."""
    totals: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, (total, count) in part.items():
            if name.startswith("max:"):
                name = name.removeprefix("max:")
                maxima[name] = max(total, maxima.get(name, total))
            else:
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + count)
    return {name: total / count for name, (total, count) in totals.items() if count} | maxima


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return ``name/mean``, ``name/max`` and ``name/min`` of the values; ``{}`` for no values."""
    known = list(values)
    if not known:
        return {}
    return {f"{name}/mean": sum(known) / len(known), f"{name}/max": max(known), f"{name}/min": min(known)}


class Tracker(Protocol):
    """Destination of metrics outside the run directory (``tracking.py``)."""

    def write(self, step: int, metrics: Mapping[str, float], warm_start: bool) -> None: ...

    def close(self) -> None: ...


class MetricWriter:
    """Writes a step's metrics to ``metrics.jsonl`` (one record a line, appended), to TensorBoard and to ``trackers``.

    Records of an earlier attempt after the resumed step are dropped. The warm start counts its steps separately
    (``sft/...``). In TensorBoard it is a separate run, because TensorBoard drops records by step alone.

    Args:
        warm_start_step: The last step of the warm start to keep.
        step: The last step of reinforcement learning to keep; -1 for none.
        trackers: Closed with the writer. They raise nothing and do not block. Most keep earlier attempts' records.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        warm_start_step: int = 0,
        step: int = -1,
        tensorboard: bool = True,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._run_dir, self._tensorboard = run_dir, tensorboard
        self._trackers = tuple(trackers)
        self._open(warm_start_step, step)

    def _open(self, warm_start_step: int, step: int) -> None:
        self._boards: dict[bool, Any] = {}
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._run_dir / "tensorboard"
            self._boards[False] = SummaryWriter(str(folder), purge_step=step + 1)
            self._boards[True] = SummaryWriter(str(folder / "warm_start"), purge_step=warm_start_step + 1)
        path = self._run_dir / "metrics.jsonl"
        if path.is_file():
            kept = [line for line in path.read_text().splitlines() if _counts(line, warm_start_step, step)]
            write_text(path, "".join(f"{line}\n" for line in kept))
        self._lines = Lines(path)

    def rewind(self, warm_start_step: int, step: int) -> None:
        """Drop records after these steps, as at the start of a job. Trackers keep them."""
        self._close()
        self._open(warm_start_step, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics. On a full disk records are lost, and TensorBoard stops until the job starts again."""
        warm_start = _is_warm_start(metrics)
        board = self._boards.get(warm_start)
        if board is not None:
            try:
                for name, value in metrics.items():
                    board.add_scalar(name, value, step)
                board.flush()
            except OSError as error:  # its thread has ended with the error
                self._boards = {}
                log.warning("TensorBoard gets no more metrics in this start: %s; training continues", error)
        for tracker in self._trackers:
            tracker.write(step, metrics, warm_start)
        self._lines.append({"step": step, **metrics})

    def close(self) -> None:
        """Close files and trackers."""
        self._close()
        for tracker in self._trackers:
            tracker.close()

    def _close(self) -> None:
        for board in self._boards.values():
            with suppress(OSError):
                board.close()
        self._lines.close()


class Lines:
    """A file of JSON records, one a line, appended to. On a full disk whole records are left out, with one warning;
    writing goes on when there is room again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO = path.open("ab", buffering=0)  # a buffer would retry failed records forever
        self._full = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record as a line."""
        line = (json.dumps(record) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(before)
            if not self._full:
                log.warning(
                    "%s cannot be written: %s; records are dropped until it can; training continues", self._path, error
                )
            self._full = True
        else:
            self._full = False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a ``metrics.jsonl``; an incomplete line of a killed process is skipped. A missing file has
    no records."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def best_step(run_dir: Path, name: str, steps: Collection[int]) -> int | None:
    """Return the step among ``steps`` with the best value of a metric in ``metrics.jsonl``; ``None`` without a value.

    The best is the smallest value of a loss, the largest of any other metric; ties go to the earliest step. If a step
    was written several times, the last value counts.
    """
    path, values = run_dir / "metrics.jsonl", dict[int, float]()
    for line in path.read_text().splitlines() if path.is_file() else ():
        if f'"{name}"' in line:  # most lines are from steps without an evaluation
            with suppress(ValueError):  # half a line, from a process that was killed
                record = json.loads(line)
                if record["step"] in steps and math.isfinite(record.get(name, math.nan)):
                    values[record["step"]] = record[name]
    sign = -1.0 if name.endswith("loss") else 1.0
    return max(sorted(values), key=lambda step: sign * values[step], default=None)


def _is_warm_start(names: Iterable[str]) -> bool:
    return any(name.startswith("sft/") for name in names)


def _counts(line: str, warm_start_step: int, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False  # half a line, from a process that was killed
    return bool(record["step"] <= (warm_start_step if _is_warm_start(record) else step))


COMMAND = "command"
"""Name of the timeline of the command that starts a job."""
NOTICE, RESTART, END = "notice", "restart", "end"
"""Phases of the command: from a stop request until all processes have ended; restart of trainer ranks alone; the moment
at which all processes have ended in order."""
DROPPED = "dropped"
"""Kind of the store event with the reasons why groups of a step were dropped."""
TIMELINE = "MEGARL_TIMELINE"
"""Environment variable with the folder and name of an engine's timeline."""


class Timeline:
    """Timeline of one process: phases with wall-clock start and end (unix seconds), for the report.

    A running phase is visible to the supervisor (``heartbeat``). Finished phases are written to
    ``<folder>/<process>.jsonl``, one a line. ``seconds`` sums the phases since ``reset``.
    """

    def __init__(self, folder: Path, process: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = Lines(folder / f"{process}.jsonl")
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        """Clear ``seconds`` before a new step."""
        self.seconds = {}

    @contextmanager
    def phase(self, name: str, **labels: Any) -> Iterator[None]:
        """Context manager that measures a phase."""
        start = time.time()
        clock = time.perf_counter()
        try:
            with heartbeat.phase(name, labels.get("step")):
                yield
        finally:
            self.add(name, start, time.perf_counter() - clock, **labels)

    def add(self, name: str, start: float, seconds: float, **labels: Any) -> None:
        """Add a phase that was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._lines.append({"phase": name, "start": round(start, 4), "seconds": round(seconds, 4), **labels})


CONSOLE = (
    ("reward", "critic/rewards/mean", "{:.3f}"),
    ("acc", "training/accuracy", "{:.1%}"),
    ("len", "response_length/mean", "{:.1f}"),
    ("kl", "actor/kl_loss", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("|g|", "actor/grad_norm", "{:.2f}"),
    ("Δlogp", "training/rollout_logp_diff_max", "{:.1e}"),
    ("rollout", "timing_s/rollout", "{:.1f}s"),
    ("infer", "timing_s/inference", "{:.1f}s"),
    ("update", "timing_s/update", "{:.1f}s"),
    ("sync", "timing_s/sync", "{:.1f}s"),
)


OFFLINE_CONSOLE = (
    ("loss", "actor/loss", "{:.4f}"),
    ("chosen preferred", "rewards/accuracies", "{:.1%}"),
    ("margin", "rewards/margins", "{:.3f}"),
    ("|g|", "actor/grad_norm", "{:.2f}"),
    ("infer", "timing_s/inference", "{:.1f}s"),
    ("update", "timing_s/update", "{:.1f}s"),
)


class PrintedSteps:
    """Choose the steps to print: about 20 lines for a short run, every hundredth step of a long one.

    The first step of a start and the last of the run are printed too, and any step a minute after the last line.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._now = steps, now
        self._every = next((every for every in (1, 2, 5, 10, 20, 50) if steps <= LINES * every), 100)
        self._printed_at = -math.inf

    def is_due(self, step: int) -> bool:
        """Return True if ``step`` (from 1) is due; the caller then prints it."""
        now = self._now()
        due = step % self._every == 0 or step == self._steps or now - self._printed_at >= SILENT_S
        if due:
            self._printed_at = now
        return due


LINES = 20
SILENT_S = 60.0


def console_line(
    step: int, steps: int, metrics: Mapping[str, float], columns: Iterable[tuple[str, str, str]] = CONSOLE
) -> str:
    """Return a step's console line, from those (label, metric, format) ``columns`` whose metric exists."""
    shown = [f"{label} {form.format(metrics[name])}" for label, name, form in columns if name in metrics]
    return f"step {step}/{steps} | " + " | ".join(shown)
