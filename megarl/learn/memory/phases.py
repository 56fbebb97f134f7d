"""Phases of a step, and the place of each model's memory in each phase; settings alone decide it.

A resident is one kind of memory of one model, named ``role.kind``. The role is actor, reference, critic, reward_model
or teachers.NAME; the kind is parameters, gradients or optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from megarl.config.derived import is_teacher, sections_of
from megarl.config.schema import Config, Offload

OFFLOAD = "offload"
"""Folder in the run directory for memory on disk, with a subfolder per rank. Its content is valid for one attempt."""


class Place(StrEnum):
    """Place of a resident's bytes."""

    DEVICE = "device"
    MEMORY = "memory"
    """A copy in host memory."""
    DISK = "disk"
    """A file of the run."""
    ABSENT = "absent"
    """No copy exists: it is written before it is read again."""


class Phase(StrEnum):
    """Parts of a step and of a trainer rank's start, each with the memory that it needs."""

    SYNC = "sync"
    REFRESH = "refresh"
    """The reference is refreshed from the actor."""
    ROLLOUT = "rollout"
    SCORES = "scores"
    OLD_LOGP = "old_logp"
    REF_LOGP = "ref_logp"
    TEACHERS = "teachers"
    """Log-probs of every teacher."""
    VALUES = "values"
    UPDATE = "update"
    SAVE = "save"
    """Checkpoint and export are written."""
    START = "start"
    """The actor is loaded, and the warm start runs."""
    CRITIC = "critic"
    """The critic is built."""
    LOAD = "load"
    """Critic and reference are loaded from a checkpoint."""


WITH_ENGINES = frozenset({Phase.SYNC, Phase.ROLLOUT})
"""Phases in which colocated engines use device memory."""
TRAINED = ("parameters", "gradients", "optimizer")
BUCKET = "optimizer_bucket"
"""Kind of the largest bucket of an optimizer's state that is on the device at once in an update."""
NEEDS: Mapping[Phase, tuple[str, ...]] = {
    Phase.SYNC: ("actor.parameters",),
    Phase.REFRESH: ("actor.parameters", "reference.parameters"),
    Phase.ROLLOUT: (),
    Phase.SCORES: ("reward_model.parameters",),
    Phase.OLD_LOGP: ("actor.parameters",),
    Phase.REF_LOGP: ("reference.parameters",),
    Phase.TEACHERS: (),
    Phase.VALUES: ("critic.parameters",),
    Phase.UPDATE: tuple(f"{role}.{kind}" for role in ("actor", "critic") for kind in TRAINED),
    Phase.SAVE: (
        "actor.parameters",
        "actor.optimizer",
        "critic.parameters",
        "critic.optimizer",
        "reference.parameters",
    ),
    Phase.START: tuple(f"actor.{kind}" for kind in TRAINED),
    Phase.CRITIC: ("actor.parameters", "reward_model.parameters", *(f"critic.{kind}" for kind in TRAINED)),
    Phase.LOAD: (*(f"critic.{kind}" for kind in TRAINED), "reference.parameters"),
}
"""Phase -> residents that it needs on the device; TEACHERS needs the parameters of all teachers too."""


def offload_setting(role: str) -> str:
    """Return the name of the setting for a role's offloading."""
    return f"{'trainer' if role == 'actor' else role}.offload"


@dataclass(frozen=True)
class PhasePlan:
    """Place of each resident in each phase. ``away``: role -> place of its memory in phases that do not need it."""

    away: Mapping[str, Place]
    saves_reference: bool = True
    """True if checkpoints include the reference, because it is refreshed every N steps."""
    adapted: bool = False
    """True if the reference is the actor without adapters."""
    streams: bool = False
    """True if updates bring the optimizers of offloaded roles to the device in buckets."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Make the plan of the settings ``<role>.offload``."""
        settings: dict[str, Offload] = {"actor": config.trainer.offload}
        settings |= {role: section.offload for role, section in sections_of(config).items()}
        away = {role: Place.DEVICE if place == "none" else Place(place) for role, place in settings.items()}
        streams = config.trainer.stream_optimizer_bytes is not None
        return cls(away, isinstance(config.reference.refresh, int), config.model.lora.is_used, streams)

    def place(self, phase: Phase, resident: str) -> Place:
        """Return the place of a resident in a phase."""
        role, _, kind = resident.rpartition(".")
        place = self.away.get(role, Place.DEVICE)  # roles added by a part of the job have no entry
        streams = self.streams and place is not Place.DEVICE and phase is Phase.UPDATE
        if kind == BUCKET:
            return Place.DEVICE if streams else Place.ABSENT
        if kind == "optimizer" and streams:
            return place
        unsaved = role == "reference" and phase in (Phase.SAVE, Phase.LOAD) and not self.saves_reference
        lends = self.adapted and phase is Phase.REF_LOGP and resident == "actor.parameters"
        teaches = phase is Phase.TEACHERS and is_teacher(role)
        if (resident in NEEDS[phase] and not unsaved) or lends or teaches:
            return Place.DEVICE
        return Place.ABSENT if place is not Place.DEVICE and kind == "gradients" else place
