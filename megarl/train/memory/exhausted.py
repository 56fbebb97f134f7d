"""Error of a trainer rank that runs out of memory: it names the phase, the bytes asked for and the models in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.core.errors import JobError, MegarlError, MemoryFullError
from megarl.core.processes.machine import bytes_asked, is_out_of_memory
from megarl.learn.memory.phases import Phase, Place
from megarl.learn.memory.residents import residents_of
from megarl.train.inference.models import Models
from megarl.train.memory.phase_memory import PhaseMemory

log = logging.getLogger(__name__)

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
    found: dict[Place, list[str]] = {}
    for role, model in (models.by_role() if hasattr(models, "actor") else {}).items():
        for resident in list(model.residents) or residents_of(role, model):
            found.setdefault(resident.place, []).append(f"{resident.name} {resident.nbytes:,} bytes")
    return found
