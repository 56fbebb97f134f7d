"""Moves the models' memory between the phases of a step, and names the phase and models when memory is exhausted."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

from megarl.core.errors import JobError, MegarlError, MemoryFullError, NonRetryableError, OffloadError
from megarl.core.metrics import Timeline
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import bytes_asked, is_out_of_memory
from megarl.learn.memory.ledger import human
from megarl.learn.memory.phases import BUCKET, OFFLOAD, WITH_ENGINES, Phase, PhasePlan, Place
from megarl.learn.memory.residents import Resident, device_bytes, release_freed_memory, residents_of
from megarl.train.inference.models import Models
from megarl.train.ranks import Ranks, RunContext

log = logging.getLogger(__name__)


class TakesTurns(Protocol):
    """Engines on the trainer's devices. Every rank makes the same calls."""

    def come(self) -> None:
        """Start using the engines on these devices, for ``Phase.SYNC``."""

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Wake sleeping engines: they allocate this memory again. Raises EngineError on rank 0."""

    def leave(self) -> dict[str, float]:
        """Make the engines free their memory; return metrics of it afterwards."""


class PhaseMemory:
    """The memory of a rank's models, moved from phase to phase. Every rank makes the same calls.

    Until ``begin`` everything stays on the device.
    """

    def __init__(self, context: RunContext, models: Models, ranks: Ranks, timeline: Timeline) -> None:
        self._models, self._ranks, self._timeline = models, ranks, timeline
        self._plan = PhasePlan.of(context.config)
        self._folder = context.run_dir / OFFLOAD / f"rank_{context.rank}"
        self._disk_bytes = context.config.trainer.offload_disk_bytes
        self._bucket_bytes = context.config.trainer.stream_optimizer_bytes
        self.engines: TakesTurns | None = None
        """Colocated engines; None without any."""
        self.phase = Phase.START
        self._charge = False
        self._measured: dict[str, float] = {}
        self._growth = Growth()

    def begin(self) -> None:
        """Start to manage the models' memory, in ``Phase.START``. Models built later begin on the device."""
        self.phase, self._charge = Phase.START, True

    def close(self) -> None:
        """Remove the offload files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # another rank still has files there, or the folder does not exist
            self._folder.parent.rmdir()

    def enter(self, phase: Phase) -> None:
        """Move memory for ``phase``: offload first, then load onto the device, as the plan says.

        Raises OffloadError on every rank if one rank failed; NonRetryableError if the files would exceed the disk
        quota; EngineError if an engine does not free its memory.
        """
        if phase is self.phase or not self._charge:
            return
        self._take_new_ones()
        before, self.phase = self.phase, phase
        leaving: list[Resident] = []
        coming: list[Resident] = []
        for resident in self._residents():
            place = self._plan.place(phase, resident.name)
            if resident.place is not place and Place.DEVICE in (resident.place, place):
                (coming if place is Place.DEVICE else leaving).append(resident)
        engines = self.engines if (before in WITH_ENGINES) is not (phase in WITH_ENGINES) else None
        if not leaving and not coming and engines is None:
            if self.engines is not None and phase in WITH_ENGINES:
                release_freed_memory()  # before the engines wake
            return
        with self._timeline.phase("offload"):
            if engines is not None and phase not in WITH_ENGINES:
                with self._timeline.phase("engines_leave"):
                    self._measured |= engines.leave()
            if leaving or coming:
                self._move(leaving, coming)
            if engines is not None and phase in WITH_ENGINES:
                release_freed_memory()
                engines.come()
        there = self._planned()
        measured = device_bytes()
        if (grown := self._growth.look(phase, measured, there)) is not None:
            log.warning("%s", grown)
        self._measured |= {
            f"memory/{phase}/planned_bytes": float(sum(there.values())),
            f"memory/{phase}/bytes": float(measured),
        }

    def _planned(self) -> dict[str, int]:
        """Return name -> bytes of the models on the device, with the largest bucket that an update brings there."""
        found: dict[str, int] = {}
        for role, model in self._models.by_role().items():
            for resident in model.residents:
                if resident.place is Place.DEVICE:
                    found[resident.name] = found.get(resident.name, 0) + resident.nbytes
            if self.phase is Phase.UPDATE and model.residents.streams:
                found[f"{role}.{BUCKET}"] = max(bucket.nbytes for bucket in model.residents.buckets)
        return found

    def metrics(self) -> dict[str, float]:
        """Return device bytes of this rank for each phase entered with a move since the last call: planned for models,
        and measured. See docs/metrics.md."""
        measured, self._measured = self._measured, {}
        return measured

    def _take_new_ones(self) -> None:
        for role, model in self._models.by_role().items():
            if not any(True for _ in model.residents):
                leaves = self._plan.away.get(role, Place.DEVICE) is not Place.DEVICE
                model.residents = residents_of(role, model, self._bucket_bytes if leaves else None, self._send_away)
                if self._plan.away.get(role) is Place.DISK:
                    self._folder.mkdir(parents=True, exist_ok=True)

    def _send_away(self, resident: Resident) -> None:
        self._check_quota([resident])
        resident.leave(self._plan.place(self.phase, resident.name), self._folder)

    def _check_quota(self, leaving: list[Resident]) -> None:
        """Raise NonRetryableError if offloading ``leaving`` would exceed this rank's disk quota."""
        there = [r for r in self._residents() if r.place is Place.DISK]
        going = [r for r in leaving if self._plan.place(self.phase, r.name) is Place.DISK]
        needed = sum(r.nbytes for r in (*there, *going))
        if self._disk_bytes is not None and needed > self._disk_bytes:
            raise NonRetryableError(
                f"{needed} bytes of a trainer rank are to be on disk, trainer.offload_disk_bytes={self._disk_bytes} "
                "are allowed: raise it, or offload a role to memory"
            )

    def _move(self, leaving: list[Resident], coming: list[Resident]) -> None:
        trained = [model for model in self._models.by_role().values() if model.optimizer is not None]
        for model in trained:
            if any(resident in leaving for resident in model.residents if resident.kind != "gradients"):
                model.keep_written()  # a sync compares with the written weights while the optimizer is offloaded
        failure: OffloadError | NonRetryableError | None = None
        try:
            self._check_quota(leaving)
            for resident in leaving:
                heartbeat.beat()
                resident.leave(self._plan.place(self.phase, resident.name), self._folder)
            for resident in coming:
                heartbeat.beat()
                resident.come_back()
        except (OffloadError, NonRetryableError) as error:
            failure = error
        release_freed_memory()
        if not self._ranks.agree(failure is None):
            raise failure or OffloadError("memory could not be moved on another trainer rank, whose log says why")
        for model in trained:
            model.forget_written()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter ``phase``; go back to the previous phase afterwards."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def _residents(self) -> list[Resident]:
        return [resident for model in self._models.by_role().values() for resident in model.residents]


LEAST_GROWTH_BYTES = 256 * 2**20
LEAST_GROWTH_SHARE = 0.1
"""Growth below either limit is not logged: allocators keep some memory, and batches differ."""


class Growth:
    """Detects memory that grows from step to step, and names the models that grew.

    Compares a device's memory in each phase with its value at the last growth.

    A single growth is no leak: the first update allocates moments, the first checkpoint allocates buffers.
    """

    def __init__(self) -> None:
        self._before: dict[Phase, tuple[int, Mapping[str, int]]] = {}
        self._grown: set[Phase] = set()

    def look(self, phase: Phase, measured: int, residents: Mapping[str, int]) -> str | None:
        """Return a warning if memory has grown in this phase, from the second growth on; else None.

        Args:
            measured: Bytes on the device.
            residents: Name -> bytes of the models on the device.
        """
        before, had = self._before.setdefault(phase, (measured, dict(residents)))
        grown = measured - before
        if grown < max(LEAST_GROWTH_BYTES, LEAST_GROWTH_SHARE * before):
            return None
        self._before[phase] = (measured, dict(residents))
        if phase not in self._grown:
            self._grown.add(phase)
            return None
        larger = [
            f"{name} by {human(size - had.get(name, 0))}" for name, size in residents.items() if size > had.get(name, 0)
        ]
        who = ", ".join(larger) if larger else "not a model: their bytes are the same"
        return f"memory in phase {phase} has grown by {human(grown)} to {human(measured)}: {who}"


MICRO_BATCHED = frozenset(
    {Phase.SCORES, Phase.OLD_LOGP, Phase.REF_LOGP, Phase.VALUES, Phase.UPDATE, Phase.START}  # START: the warm start
)
"""Phases whose memory grows with the size of micro-batches."""


@contextmanager
def memory_explained(memory: PhaseMemory, models: Models) -> Iterator[None]:
    """Raise a MemoryFullError for an allocation that fails in the body.

    Raises a plain JobError in phases that smaller micro-batches would not help.
    """
    try:
        yield
    except MegarlError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.error("out of memory here:", exc_info=error)
        kind = MemoryFullError if memory.phase in MICRO_BATCHED else JobError
        raise kind(_described(error, memory.phase, models)) from error


def _described(error: Exception, phase: Phase, models: Models) -> str:
    asked = bytes_asked(error)
    there = {place: ", ".join(names) for place, names in _residents(models).items()}
    device = there.pop(Place.DEVICE, "no model")
    away = "".join(f"; {place}: {names}" for place, names in there.items())
    return (
        f"out of memory in phase {phase}{f', {asked} were asked for' if asked else ''}; on the device: {device}{away}; "
        f"{type(error).__name__}: {error}"
    )


def _residents(models: Models) -> dict[Place, list[str]]:
    """Return place -> name and bytes of each resident, also before ``PhaseMemory`` manages them."""
    found: dict[Place, dict[str, int]] = {}
    for role, model in (models.by_role() if hasattr(models, "actor") else {}).items():
        for resident in list(model.residents) or residents_of(role, model):
            sizes = found.setdefault(resident.place, {})
            sizes[resident.name] = sizes.get(resident.name, 0) + resident.nbytes
    return {place: [f"{name} {size:,} bytes" for name, size in sizes.items()] for place, sizes in found.items()}
