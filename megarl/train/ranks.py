"""Facts and progress of a trainer rank's run, decisions that ranks take together, and output for users."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from megarl.buffer.store import NOTHING_USED, Store, Used
from megarl.buffer.store.engines import BusyTime
from megarl.config import Config, to_dict
from megarl.core.errors import JobError, MegarlError
from megarl.core.jobs import PROGRAM, TRAIN, ProcessKind
from megarl.core.kept_batches import KeptBatch, KeptValues, forget_after, path_of, values_path
from megarl.core.metrics import CONSOLE, DROPPED, MetricWriter, Sums, Timeline, console_line
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import born
from megarl.core.text import Repeats
from megarl.learn import algorithms
from megarl.tasks import recorded
from megarl.train.tracking import RunInfo, open_trackers

T = TypeVar("T")


class Stopped(Exception):
    """The job was asked to stop. Raised on every rank, with models and state unchanged. ``str``: an error since then,
    if any."""


class Ranks:
    """Collectives over all ranks, and the request to stop. Every rank makes the same calls."""

    def __init__(self) -> None:
        self.stopping = False
        """True if this rank was asked to stop; all ranks agree on ``stop_requested``."""

    def stop_on_sigterm(self) -> None:
        """Treat SIGTERM as a request to stop. SIGINT is ignored: the supervisor decides."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def stop_requested(self) -> bool:
        """True on every rank if any rank has been asked to stop."""
        return not self.agree(not self.stopping)

    def agree(self, yes: bool) -> bool:
        """True on all ranks if ``yes`` is True on all ranks."""
        heartbeat.beat()
        flag = torch.tensor([int(yes)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def gather(self, mine: Sequence[Sums]) -> list[Sums]:
        """Return all ranks' metric sums, on every rank."""
        everyone: list[list[Sums]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(mine))
        return [sums for rank in everyone for sums in rank]

    def wait_for_all(self) -> None:
        """Wait until every rank calls it."""
        dist.barrier()


def on_all_ranks(action: Callable[[], T]) -> T:
    """Return the result of ``action`` here, once it has returned on every rank. Every rank calls it.

    For checks of one rank's data: if only that rank raised, the others would fail on a lost connection.

    A rank that failed raises its error. The others raise the first failed rank's error: a MegarlError as it is, another
    exception as a JobError.
    """
    if not dist.is_initialized():
        return action()
    mine: Exception | None = None
    fault: tuple[type[MegarlError], str] | None = None
    try:
        result = action()
    except Exception as error:
        mine = error
        if isinstance(error, MegarlError):
            fault = type(error), str(error)
        else:
            fault = JobError, f"{type(error).__name__} on another rank: {error}"
    heartbeat.beat()
    everyone: list[tuple[type[MegarlError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, fault)
    if mine is not None:
        raise mine
    for met in everyone:
        if met is not None:
            raise met[0](met[1])
    return result


@dataclass(frozen=True)
class RunContext:
    """One trainer rank's place in its run."""

    config: Config
    run_dir: Path
    attempt: int
    """Number of this start of the job; stores and files reject an older one."""
    rank: int
    program: str = TRAIN

    @classmethod
    def of(cls, config: Config, rank: int) -> Self:
        """Read this process's place from the environment that the supervisor set."""
        program = os.environ.get(PROGRAM, TRAIN)
        return cls(config, Path(config.run.dir), int(os.environ["MEGARL_ATTEMPT"]), rank, program)

    @cached_property
    def bad_rows(self) -> dict[str, frozenset[str]]:
        """Split -> ids of the rows left out at the start of the run (``taskset.bad_rows``)."""
        return recorded(self.config.taskset, self.run_dir)

    def open_store(self) -> Store:
        """Open the store; the supervisor has made its tables. Connects on first use: a job may have more ranks than a
        database allows sessions."""
        store = self.config.store
        return Store(store.url, attempt=self.attempt, outage_s=store.outage_s, program=self.program, has_tables=True)


WARM_START = "warm_start"


@dataclass(frozen=True)
class TrainState:
    """Stored in a checkpoint's manifest, next to model and optimizer."""

    phase: str = WARM_START
    step: int = 0
    """Completed steps of the phase."""
    kl_coef: float | None = None
    """Coefficient of the next step, if it adapts; None stands for ``algorithm.kl.coef``."""
    rollbacks: int = 0
    """Number of rollbacks after bad updates; a step's tasks and seeds depend on it."""
    grad_norms: Mapping[str, list[float]] = field(default_factory=dict)
    """Model -> gradient norms of its last updates, which define a spike."""

    @property
    def warming_up(self) -> bool:
        """True in the warm start."""
        return self.phase == WARM_START

    @classmethod
    def from_manifest(cls, saved: Mapping[str, Any]) -> TrainState:
        """Read a manifest; missing fields have their values at the start of a run."""
        return cls(**{name.name: saved[name.name] for name in fields(cls) if name.name in saved})


SILENCE_S = 40.0
"""An explorer counts as ended this many seconds after its last report; it reports at least every 10 s."""


class EngineIdleness:
    """Share of a step in which the explorers had no sample in flight at any engine.

    Computed from differences of the explorers' reports; a new explorer counts from its second report on."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._looked = now()
        self._before: dict[str, float] = {}

    def share(self, times: Mapping[str, BusyTime]) -> float | None:
        """Return the mean idle share over explorers since the last call; None if no explorer was seen twice.

        Args:
            times: Current result of ``Store.workers.busy_times``.
        """
        now = self._now()
        passed, self._looked = now - self._looked, now
        seconds = {name: busy.until(now) for name, busy in times.items() if now - busy.at < SILENCE_S}
        # A restarted explorer counts from 0.
        busy = [seconds[name] - before for name, before in self._before.items() if seconds.get(name, -1.0) >= before]
        self._before = seconds
        if not busy or passed <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - sum(busy) / len(busy) / passed))


ALL_STEPS = 2**31


class Reporter:
    """Writes metrics and lines on rank 0, and every rank's timeline."""

    def __init__(self, context: RunContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._writer: MetricWriter | None = None
        self._engines, self._repeats = EngineIdleness(), Repeats()
        self.timeline = Timeline(context.run_dir / "timeline", f"trainer_{context.rank}")
        """Its ``phase`` is a context manager that measures."""

    def record_start(self) -> None:
        """Add the seconds since the process began to the timeline."""
        self.timeline.add("start", born(), time.time() - born(), attempt=self._context.attempt)

    def open(self, state: TrainState) -> None:
        """Begin to write metrics; earlier metrics count up to ``state``."""
        if self._context.rank:
            return
        config = self._context.config
        warm_start_step, step = _last_steps(state)
        forget_after(self._context.run_dir, step)
        self._writer = MetricWriter(
            self._context.run_dir,
            warm_start_step=warm_start_step,
            step=step,
            tensorboard="tensorboard" in config.trainer.trackers,
            trackers=open_trackers(
                config.trainer.trackers, RunInfo(config.run.name, self._context.run_dir, to_dict(config))
            ),
        )

    def rewind(self, state: TrainState) -> None:
        """Drop metrics and batches of steps after ``state``, after a rollback to it."""
        if self._writer is not None:
            warm_start_step, step = _last_steps(state)
            forget_after(self._context.run_dir, step)
            self._writer.rewind(warm_start_step, step)

    def close(self) -> None:
        """Close the metric writers."""
        if self._writer is not None:
            self._writer.close()

    def progress(self, total: int | None, label: str, unit: str) -> Any:
        """Return a progress bar, which shows on rank 0 with a terminal only."""
        show = self._context.rank == 0 and os.environ.get("MEGARL_TTY") == "1"
        return tqdm(total=total, desc=label, unit=unit, leave=False, disable=not show, file=sys.stderr, ncols=100)

    def log(self, text: str) -> None:
        """Print a line, from rank 0."""
        if self._context.rank == 0:
            with suppress(OSError):  # the log may be on a full disk
                tqdm.write(text, file=sys.stderr)

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the trainer in the store, from rank 0."""
        if self._context.rank == 0:
            self._store.journal.record_event("trainer", kind, data)

    def dropped(self, step: int, messages: Sequence[str]) -> None:
        """Record why groups of ``step`` (from 1) were dropped, and print each reason once.

        Args:
            messages: ``Report.messages``: the groups, then the reason.
        """
        if not messages:
            return
        self.event(DROPPED, {"step": step, "messages": list(messages)})
        for message in messages:
            if self._repeats.is_new(message.partition(": ")[2]):
                self.log(f"dropped from training: {message} (the report counts further ones)")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics to the run's files and trackers, from rank 0."""
        if self._writer is not None:
            self._writer.write(step, metrics)

    def keep(self, step: int, metrics: Mapping[str, float], used: Used = NOTHING_USED) -> None:
        """Commit a step to the store, from rank 0: its metrics, and the groups that it has used.

        A later call replaces the metrics.
        """
        if self._context.rank == 0:
            self._store.journal.record_step(step, metrics, used)

    def keep_batch(self, step: int, batch: KeptBatch | KeptValues | None) -> None:
        """Write a step's batch file; a write error is logged only. ``batch`` is None on ranks other than 0."""
        if batch is None:
            return
        place = path_of if isinstance(batch, KeptBatch) else values_path
        try:
            batch.write(place(self._context.run_dir, step))
        except OSError as error:
            self.log(f"WARNING: step {step}: the file of its batch could not be written ({error}); training goes on")

    def record_step(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        tokens: int,
        used: Used = NOTHING_USED,
        console: Iterable[tuple[str, str, str]] = CONSOLE,
        printed: bool = True,
    ) -> None:
        """Write the metrics of a step that has ended, with the seconds of its phases; print a line if ``printed``."""
        config, seconds = self._context.config, self.timeline.seconds
        metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
        if config.taskset.bad_rows == "drop":
            metrics["taskset/bad_rows"] = float(sum(map(len, self._context.bad_rows.values())))
        metrics |= {"perf/total_num_tokens": float(tokens), "perf/time_per_step": seconds["step"]}
        metrics["perf/throughput"] = tokens / (seconds["step"] * num_devices(config))
        if "rollout" in seconds:
            metrics["idle/trainer"] = seconds["rollout"] / seconds["step"]
            if self._context.rank == 0 and (idle := self._engines.share(self._store.workers.busy_times())) is not None:
                metrics["idle/engines"] = idle
        self.write(step, metrics)
        self.keep(step, metrics, used)
        if printed:
            self.log(console_line(step, config.trainer.steps, metrics, console))


def num_devices(config: Config) -> int:
    """Return the number of devices of a job: one for each trainer rank and each engine worker."""
    rollout = config.rollout
    has_engines = algorithms.job_of(config).has(ProcessKind.ENGINE)
    engines = rollout.replicas * rollout.tp * rollout.pp if has_engines else 0
    return config.parallel.world_size + engines


def _last_steps(state: TrainState) -> tuple[int, int]:
    """Return the last steps with valid metrics: (of the warm start, of the phase after it)."""
    return (state.step, -1) if state.warming_up else (ALL_STEPS, state.step)
