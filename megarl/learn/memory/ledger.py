"""Bytes on every device in each phase of a step, and the fewest models to offload to fit a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from megarl.config.derived import TEACHERS, is_teacher
from megarl.learn.memory.phases import WITH_ENGINES, Phase, PhasePlan, Place

ENGINE_WEIGHTS, ENGINE_KV_CACHE = "engine.weights", "engine.kv_cache"
ASKED: Mapping[Phase, str] = {
    Phase.REFRESH: "reference",
    Phase.SCORES: "reward_model",
    Phase.REF_LOGP: "reference",
    Phase.TEACHERS: TEACHERS,
    Phase.VALUES: "critic",
    Phase.CRITIC: "critic",
    Phase.LOAD: "critic",
}
"""Phase -> role; a job without the role has no such phase."""
FIRST_TO_LEAVE = ("reward_model", "reference", "critic", "actor")
"""Roles in the order of the cost of moving them, cheapest first. Teachers come before them."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class PhaseBytes:
    """Memory of one rank in one phase."""

    phase: Phase
    rank: int
    device: Mapping[str, int]
    """Resident on the device -> bytes."""
    memory: int
    """Bytes of copies in host memory."""
    disk: int
    """Bytes of copies in files."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())


@dataclass(frozen=True)
class Ledger:
    """Residents of every rank's device under a plan.

    Engines that are not colocated have separate devices: their residents are not included.
    """

    plan: PhasePlan
    ranks: Sequence[Mapping[str, int]]
    """Resident -> bytes, for each rank: ``role.kind``, ``engine.weights`` and ``engine.kv_cache``."""
    colocated: bool = False
    keeps_weights: bool = False
    """True if colocated engines keep weights in host memory while the trainer computes (``rollout.offload=memory``)."""
    phases: tuple[Phase, ...] = tuple(Phase)
    """Phases to count."""
    start: Sequence[Mapping[str, int]] | None = None
    """``ranks`` in phase START, if a warm start trains another model than the steps; otherwise None."""

    @property
    def of_job(self) -> list[Phase]:
        """Phases of the job: ``phases`` except phases of missing roles."""
        roles = {TEACHERS if is_teacher(role) else role for role in self._roles()}
        return [phase for phase in self.phases if ASKED.get(phase, "actor") in roles]

    def __iter__(self) -> Iterator[PhaseBytes]:
        """Iterate over the job's phases, each on the rank with most bytes on its device."""
        return (self.most(phase) for phase in self.of_job)

    def place(self, phase: Phase, resident: str) -> Place:
        """Return the place of a resident in a phase, engines included."""
        if not resident.startswith("engine."):
            return self.plan.place(phase, resident)
        # In a sync too: an engine that starts during a sync, as each does once, allocates its KV cache immediately.
        if self.colocated and phase in WITH_ENGINES:
            return Place.DEVICE
        kept = self.colocated and self.keeps_weights and resident == ENGINE_WEIGHTS
        return Place.MEMORY if kept else Place.ABSENT

    def at(self, phase: Phase, rank: int) -> PhaseBytes:
        """Return the memory of a rank in a phase."""
        by_place: dict[Place, dict[str, int]] = {place: {} for place in Place}
        for resident, size in self._residents(phase, rank).items():
            by_place[self.place(phase, resident)][resident] = size
        memory, disk = (sum(by_place[place].values()) for place in (Place.MEMORY, Place.DISK))
        return PhaseBytes(phase, rank, by_place[Place.DEVICE], memory, disk)

    def host_bytes(self, rank: int, *, kept: bool) -> int:
        """Return the most bytes of a rank's copies in host memory.

        Args:
            kept: Copies keep their memory while the model is on the device, as on GPUs.
        """
        if not kept:
            return max(self.at(phase, rank).memory for phase in self.of_job)
        away: dict[str, int] = {}
        for phase in self.of_job:
            for resident, size in self._residents(phase, rank).items():
                if self.place(phase, resident) is Place.MEMORY:
                    away[resident] = max(size, away.get(resident, 0))
        return sum(away.values())

    def _residents(self, phase: Phase, rank: int) -> Mapping[str, int]:
        if self.start is None or phase is not Phase.START:
            return self.ranks[rank]
        return self.start[rank] if rank < len(self.start) else {}  # more engine workers than ranks

    def most(self, phase: Phase) -> PhaseBytes:
        """Return the memory of the rank with most bytes on its device in a phase; the first of equal ones."""
        return max((self.at(phase, rank) for rank in range(len(self.ranks))), key=lambda found: found.total)

    def largest(self) -> PhaseBytes:
        """Return the phase and rank with most bytes on a device; the first of equal ones."""
        return max(self, key=lambda found: found.total)

    def fits(self, budget_bytes: int) -> bool:
        """True if no device has more than ``budget_bytes`` in any phase."""
        return self.largest().total <= budget_bytes

    def nearest(self, budget_bytes: int) -> PhasePlan | None:
        """Return the fitting plan that moves the fewest roles to host memory, this one if it fits; None if none fits.

        Among plans with equally many moves, the first by ``FIRST_TO_LEAVE``. Roles already offloaded stay offloaded.
        """
        roles = self._roles()
        order = (*sorted(filter(is_teacher, roles)), *FIRST_TO_LEAVE)
        left = [role for role in order if role in roles and self.plan.away[role] is Place.DEVICE]
        for number in range(len(left) + 1):
            for moved in combinations(left, number):
                plan = replace(self.plan, away={**self.plan.away, **dict.fromkeys(moved, Place.MEMORY)})
                if replace(self, plan=plan).fits(budget_bytes):
                    return plan
        return None

    def table(self) -> str:
        """Format a table with a row per phase: its largest rank, bytes on device, in memory and on disk, residents."""
        rows: list[tuple[str, ...]] = [("phase", "rank", "device", "memory", "disk", "on the device")]
        for found in self:
            sizes = (human(size) for size in (found.total, found.memory, found.disk))
            held = (f"{name} {human(size)}" for name, size in found.device.items() if size)
            rows.append((str(found.phase), str(found.rank), *sizes, ", ".join(held) or "nothing"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join(
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(w) for cell, w in zip(row[1:5], widths[1:], strict=True)),
                    row[5],
                ]
            )
            for row in rows
        )

    def _roles(self) -> set[str]:
        return {resident.rpartition(".")[0] for rank in self.ranks for resident in rank}


def human(size: int) -> str:
    """Format bytes with three digits in a fitting unit: ``1.50 GiB``."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{size} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {UNITS[unit]}"
