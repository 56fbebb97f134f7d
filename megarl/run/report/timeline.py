"""Timeline of a run: the phases that processes wrote to ``timeline/*.jsonl``, split and summed for the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.metrics import COMMAND

WAITING = frozenset({"rollout", "evaluation", "wait_for_engine"})
"""Phases in which a trainer rank waits for explorer and engines."""
CONTAINER = "step"
"""Phase that contains a step's other phases; its remaining time is shown as ``other``."""


class TimedPhase(NamedTuple):
    """A phase of one process; ``step`` counts from 0."""

    name: str
    start: float
    """unix seconds"""
    end: float
    step: int | None = None


def exclusive(phases: Iterable[TimedPhase]) -> list[TimedPhase]:
    """Split the phases of one process so that each moment belongs to the innermost phase. ``step`` becomes the
    enclosing step's (None outside of steps), and the rest of a step is called ``other``."""
    pieces: list[TimedPhase] = []
    stack: list[TimedPhase] = []
    at = -math.inf

    def advance(until: float) -> None:
        nonlocal at
        while stack:
            top = stack[-1]
            begin, end = max(at, top.start), min(top.end, until)
            if end > begin:
                pieces.append(TimedPhase("other" if top.name == CONTAINER else top.name, begin, end, top.step))
                at = end
            if top.end > until:
                break
            stack.pop()
        at = max(at, until)

    for phase in sorted(phases, key=lambda p: (p.start, -p.end)):
        # Start and length are rounded and come from two clocks, so neighbours may overlap a little, and a phase may
        # seem to outlast its container: the larger part decides.
        while stack and stack[-1].end - phase.start < (phase.end - phase.start) / 2:
            stack[-1] = stack[-1]._replace(end=min(stack[-1].end, phase.start))
            advance(phase.start)
        advance(phase.start)
        end = min(phase.end, stack[-1].end) if stack else phase.end
        inside = phase.step if phase.name == CONTAINER else stack[-1].step if stack else None
        stack.append(phase._replace(end=end, step=inside))
    advance(math.inf)
    return pieces


def last_start(timelines: Mapping[str, Sequence[TimedPhase]]) -> tuple[float, float] | None:
    """Return (start, end) of the last start, from the command until the engines had joined; None if none was
    recorded."""
    began = [phase.start for phase in timelines.get(COMMAND, ()) if phase.name == "import"]
    joined = [phase.end for phase in timelines.get("trainer_0", ()) if phase.name == "wait_for_engine"]
    ends = [end for end in joined if began and end > began[-1]]
    return (began[-1], ends[0]) if ends else None


def without_refused(phases: Sequence[TimedPhase]) -> list[TimedPhase]:
    """Return the command's phases without starts that spawned no process: refused starts, and starts of a finished
    run."""
    starts: list[list[TimedPhase]] = [[]]
    for phase in phases:
        if phase.name == "import":
            starts.append([])
        starts[-1].append(phase)
    return [phase for start in starts for phase in start if any(one.name == "spawn" for one in start)]


def union(phases: Iterable[TimedPhase], *, bridge_s: float = 0.0) -> list[tuple[float, float]]:
    """Return (start, end) of the time covered by any phase; gaps of up to ``bridge_s`` count as covered."""
    spans: list[tuple[float, float]] = []
    for phase in sorted(phases, key=lambda p: p.start):
        if spans and phase.start <= spans[-1][1] + bridge_s:
            spans[-1] = (spans[-1][0], max(spans[-1][1], phase.end))
        else:
            spans.append((phase.start, phase.end))
    return spans


def rows(process: str, phases: Sequence[TimedPhase]) -> list[list[TimedPhase]]:
    """Return a process's phases as rows without overlap: one row for a trainer rank, which runs one phase at a time;
    one row per kind of phase for other processes."""
    if kind_of(process) is ProcessKind.TRAINER:
        return [exclusive(phases)]
    kinds: dict[str, list[TimedPhase]] = defaultdict(list)
    for phase in sorted(phases, key=lambda p: p.start):
        kinds[phase.name].append(phase)
    return [[TimedPhase(name, start, end) for start, end in union(kinds[name])] for name in kinds]


def seconds_by_phase(process: str, phases: Sequence[TimedPhase]) -> dict[str, float]:
    """Return the seconds of a process in each phase, largest first; a trainer rank's phases do not overlap."""
    total: dict[str, float] = defaultdict(float)
    for row in rows(process, phases):
        for piece in row:
            total[piece.name] += piece.end - piece.start
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def seconds_by_step(phases: Sequence[TimedPhase]) -> dict[int, dict[str, float]]:
    """Return step (from 1) -> seconds in each of its phases; a step repeated after a resume counts once, the last
    time."""
    last = {p.step: p for p in sorted(phases, key=lambda p: p.start) if p.name == CONTAINER and p.step is not None}
    found: dict[int, dict[str, float]] = {
        step + 1: defaultdict(float) for step in sorted(s for s in last if s is not None)
    }
    for piece in exclusive(phases):
        if piece.step in last and piece.start >= last[piece.step].start:
            found[piece.step + 1][piece.name] += piece.end - piece.start
    return {step: dict(seconds) for step, seconds in found.items()}
