"""Seconds of a run by cause: steps that were kept, and everything that was lost or spent around them.

Computed from ``timeline/command.jsonl`` and ``timeline/trainer_0.jsonl``, which survive kills. Every moment between the
first start and the end belongs to one cause, so the causes add up to the wall time.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megarl.core.metrics import COMMAND, END, NOTICE, RESTART, records
from megarl.run.report.data import timelines_of
from megarl.run.report.svg import CONTAINER, TimedPhase, exclusive

STEPS = "steps"
CAUSES = {
    STEPS: "steps and warm start that are kept",
    "evaluations": "held-out tasks",
    "checkpoints": "saving, and the exported model",
    "start": "from a command, or from its start of the whole job, until the engines have joined",
    "restart": "trainer ranks started again, or engines waited for, while the command goes on",
    "lost work": "steps trained again later, and steps that a kill cut off",
    "notice": "from a stop request until all processes have ended, without kept steps",
    "down": "no command runs; after a kill from its last recorded phase",
    "between": "between two phases of a trainer rank, and the job's end",
    "under way": "since the last recorded phase of a running job",
}
"""Cause -> meaning, in the order of the table."""
START_UP = frozenset({"start", "load", "wait_for_engine"})
SAVING = frozenset({"checkpoint", "export", "keep"})
RANK = "trainer_0"
_SLACK_S = 1e-3
"""Rounding of recorded times."""
_TICK_S = 0.02
"""Most seconds by which a command's start is recorded too early: a clock tick, twice."""


class Spent(NamedTuple):
    """A span of time with its cause; unix seconds."""

    cause: str
    start: float
    end: float


@dataclass(frozen=True)
class SecondsByCause:
    """Wall time of a run, split without gaps."""

    spans: Sequence[Spent]
    """In order; each begins where the last one ends."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first start to the end."""
        return self.spans[-1].end - self.spans[0].start

    @property
    def seconds(self) -> dict[str, float]:
        """Cause -> its seconds, in the order of ``CAUSES``, without causes that took none."""
        total = dict.fromkeys(CAUSES, 0.0)
        for span in self.spans:
            total[span.cause] += span.end - span.start
        return {cause: seconds for cause, seconds in total.items() if seconds}

    @property
    def goodput(self) -> float:
        """Share of the wall time in steps that are kept."""
        return self.seconds.get(STEPS, 0.0) / self.wall_s

    def notices(self) -> list[dict[str, float]]:
        """Return cause -> seconds between the last kept step before the exit and the next one, for each notice after
        which the run went on."""
        found: list[dict[str, float]] = []
        since: dict[str, float] = {}
        for span in self.spans:
            if span.cause == STEPS:
                if NOTICE in since:
                    found.append(since)
                since = {}
            else:
                since[span.cause] = since.get(span.cause, 0.0) + span.end - span.start
        return found

    def line(self) -> str:
        """Return one line for the terminal."""
        rest = sorted(((s, c) for c, s in self.seconds.items() if c != STEPS), reverse=True)
        parts = ", ".join(f"{cause} {seconds / self.wall_s:.1%}" for seconds, cause in rest)
        return f"goodput: {self.goodput:.1%} of {self.wall_s:.0f} s in steps that are kept ({parts})"


def account_of(run_dir: Path) -> SecondsByCause | None:
    """Return the account of a run that has ended or stopped; None if no trainer rank has recorded a phase."""
    done = [r["step"] for r in records(run_dir / "metrics.jsonl") if "training/global_step" in r]
    return account(timelines_of(run_dir, []), max(done, default=0))


def account(
    timelines: Mapping[str, Sequence[TimedPhase]], steps_done: int, *, running: bool = False
) -> SecondsByCause | None:
    """Split a run's wall time by cause; None if there is no trainer rank or no command in its timelines.

    Args:
        timelines: Process -> phases. ``command`` has no starts that were refused.
        steps_done: Steps that the run keeps.
        running: The wall time ends now, not with the last recorded phase.
    """
    command, rank = timelines.get(COMMAND, ()), timelines.get(RANK, ())
    if not command or not rank:
        return None
    marks = _Marks(command, rank, [p.end for phases in timelines.values() for p in phases])
    begin, end = min(p.start for p in (*command, *rank)), max(marks.life[-1], time.time() if running else 0.0)
    filled = _filled(marks, _pieces(marks, rank, steps_done), begin, end, "under way" if running else "lost work")
    spans = list(_split(filled, marks.notices))
    return SecondsByCause(spans) if spans else None


class _Marks:
    """Moments at which the course of a run changed."""

    def __init__(self, command: Iterable[TimedPhase], rank: Iterable[TimedPhase], life: Iterable[float]) -> None:
        of: dict[str, list[TimedPhase]] = {}
        for phase in sorted(command, key=lambda phase: phase.start):
            of.setdefault(phase.name, []).append(phase)
        self.commands = [phase.start for phase in of.get("import", ())]
        """Starts of the command."""
        self.ends = [phase.end for phase in of.get(END, ())]
        """Moments at which all processes had ended in order."""
        self.again = sorted([*(p.start for p in (*of.get("prepare", ()), *of.get(RESTART, ()))), *self.ends])
        """Moments at which the command began to start processes, or all had ended."""
        self.notices = [(phase.start, phase.end) for phase in of.get(NOTICE, ())]
        self.ranks = sorted(phase.start for phase in rank if phase.name == "start")
        """Starts of the rank."""
        self.life = sorted(life)

    def is_first(self, moment: float) -> bool:
        """True if the rank's last start before a moment is the first one of its command."""
        last = bisect_right(self.ranks, moment + _SLACK_S) - 1
        if last <= 0:
            return True
        return bisect_right(self.commands, self.ranks[last - 1]) < bisect_right(self.commands, self.ranks[last])


def _within(moments: Sequence[float], start: float, end: float) -> Sequence[float]:
    """Return the sorted moments from ``start`` to ``end``."""
    return moments[bisect_left(moments, start - _SLACK_S) : bisect_right(moments, end + _SLACK_S)]


def _pieces(marks: _Marks, rank: Sequence[TimedPhase], steps_done: int) -> Iterator[Spent]:
    """Yield the phases of the rank without overlap, each with its cause."""
    last = {(p.name, p.step): p.start for p in sorted(rank, key=lambda p: p.start)}
    finished = [p for p in rank if p.name == CONTAINER or p.name in {"warm_start", "evaluation", *SAVING, *START_UP}]
    steps = sorted(p.start for p in rank if p.name == CONTAINER)
    evaluations = {p.start: p for p in rank if p.name == "evaluation"}
    ends = _ends_of_attempts(marks, finished)
    for piece in exclusive(rank):
        cause = "between"
        evaluation = evaluations.get(piece.start)
        if piece.step is not None:
            begun = steps[bisect_right(steps, piece.start + _SLACK_S) - 1]
            is_kept = piece.step < steps_done and begun == last[CONTAINER, piece.step]
            cause = STEPS if is_kept else "lost work"
        if cause == "lost work":
            pass
        elif piece.name in START_UP:
            cause = "start" if marks.is_first(piece.start) and piece.step is None else RESTART
        elif piece.name in SAVING:
            cause = "checkpoints"
        elif piece.name == "evaluation":
            is_last = evaluation is None or last["evaluation", evaluation.step] == evaluation.start
            cause = "evaluations" if is_last else "lost work"
        elif piece.name == "warm_start":
            cause = STEPS
        elif piece.step is None:  # weights for an evaluation, or a step that never ended
            number = bisect_right(marks.ranks, piece.start + _SLACK_S)
            cause = "evaluations" if piece.start < ends.get(number, 0.0) else "lost work"
        yield Spent(cause, piece.start, piece.end)


def _ends_of_attempts(marks: _Marks, finished: Iterable[TimedPhase]) -> dict[int, float]:
    """Return number of a rank's start -> end of the last step, evaluation, checkpoint or start-up in it."""
    ends: dict[int, float] = {}
    for phase in finished:
        number = bisect_right(marks.ranks, phase.start + _SLACK_S)
        ends[number] = max(phase.end, ends.get(number, 0.0))
    return ends


def _filled(marks: _Marks, pieces: Iterable[Spent], begin: float, end: float, last: str) -> Iterator[Spent]:
    """Yield the pieces, and between them the causes of the time in which the rank recorded no phase; ``last``: the
    cause of time after the last piece."""
    at, before = begin, "start"
    for piece in pieces:
        start = max(at, piece.start)
        if start > at:
            yield from _gap(marks, at, start, before if before in ("start", RESTART) else "between")
        if piece.end > start:
            yield piece._replace(start=start)
            at, before = piece.end, piece.cause
    if end > at:
        yield from _gap(marks, at, end, last)


def _gap(marks: _Marks, start: float, end: float, otherwise: str) -> Iterator[Spent]:
    """Yield the causes of a span in which the rank recorded nothing; ``otherwise``: the cause within one attempt."""
    commands, again = _within(marks.commands, start - _TICK_S, end), _within(marks.again, start, end)
    parts: list[tuple[str, float]] = []
    cause = "lost work" if marks.ranks and start > marks.ranks[0] else "start"
    for command in commands:
        ended = [moment for moment in marks.ends if start - _SLACK_S < moment <= command]
        before = [moment for moment in marks.life if start < moment <= command + _SLACK_S]
        parts += [("between" if ended else cause, min(before[-1], command) if before else start), ("down", command)]
        cause = "start"
    if commands:
        parts.append(("start", end))
    elif _within(marks.ranks, start, end) or again:
        is_end = bool(_within(marks.ends, start, end))
        parts.append(("between" if is_end else cause, again[0] if again else end))
        parts.append(("between" if is_end else "start" if marks.is_first(end) else RESTART, end))
    else:
        parts.append((otherwise, end))
    for name, until in parts:
        if until > start:
            yield Spent(name, start, until)
            start = until


def _split(spans: Iterable[Spent], notices: Sequence[tuple[float, float]]) -> Iterator[Spent]:
    """Yield the spans; what lies in a notice counts for it, kept steps and evaluations aside."""
    for span in spans:
        if span.cause in (STEPS, "evaluations"):
            yield span
            continue
        for begin, end in notices:
            start, stop = max(span.start, begin), min(span.end, end)
            if start < stop:
                if span.start < start:
                    yield span._replace(end=start)
                yield Spent(NOTICE, start, stop)
                span = span._replace(start=stop)
        if span.end > span.start:
            yield span
