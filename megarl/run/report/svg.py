"""Small charts as SVG text, and the timeline of a run's phases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple
from zlib import crc32

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


Series = Sequence[tuple[int, float]]
MAX_POINTS = 400
"""Maximum points of a curve; more are averaged, since they are not visible and would enlarge the page."""
COLOURS = {
    "other": 0,
    "sync": 1,
    "rollout": 2,
    "batch": 3,
    "inference": 4,
    "update": 5,
    "checkpoint": 6,
    "warm_start": 7,
    "evaluation": 8,
    "generation": 2,
    "reward": 7,
}
"""Phase -> colour of the page's CSS (``.c0`` … ``.c8``); other phases get one by hash of their name."""


RUN_COLOURS = 8
"""Colours of runs on one chart (``.r0`` … of the page's CSS)."""


@dataclass(frozen=True)
class Markers:
    """Single points, labelled with their values."""

    label: str
    points: Series
    percent: bool = True


def colour(phase: str) -> str:
    """Return the CSS class of a phase's colour."""
    return f"c{COLOURS.get(phase, 1 + crc32(phase.encode()) % 8)}"


def fill(phase: str, *, waits: bool) -> str:
    """Return the CSS class of a phase's bar: hatched if the process waits."""
    return "wait" if waits else colour(phase)


def number(value: float) -> str:
    """Format a number with about three digits."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e5:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers within [low, high]."""
    span = high - low
    if span <= 1e-12 * max(abs(low), abs(high), 1e-200):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Series, limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Reduce to at most ``limit`` points: means over equal stretches."""
    if len(points) <= limit:
        return list(points)
    parts = [points[i * len(points) // limit : (i + 1) * len(points) // limit] for i in range(limit)]
    return [(part[-1][0], sum(v for _, v in part) / len(part)) for part in parts]


def window(count: int) -> int:
    """Return the length of the running mean for ``count`` points; 1 is no mean."""
    return 1 if count < 20 else 2 * (count // 24) + 1


def smoothed(points: Series) -> list[tuple[int, float]]:
    """Return the centred running mean over ``window`` points, fewer at the ends."""
    half = window(len(points)) // 2
    values = [v for _, v in points]
    spans = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(x, sum(span) / len(span)) for (x, _), span in zip(points, spans, strict=True)]


class _Axes:
    """Maps data to a chart's plane and draws the frame."""

    def __init__(
        self, width: int, height: int, xs: Sequence[float], ys: Sequence[float], *, zero: bool = False, left: int = 44
    ) -> None:
        self.width, self.height, self.left, self.right, self.top, self.bottom = width, height, left, 14, 12, 22
        low, high = min(ys), max(ys)
        low = min(low, 0.0) if zero else low
        size = max(abs(low), abs(high))
        flat = high - low <= 1e-9 * max(size, 1e-200)
        pad = (size * 0.1 if size > 1e-200 else 1.0) if flat else (high - low) * 0.06
        self.y_low, self.y_high = (low if zero and low == 0 else low - pad), high + pad
        self.x_low, self.x_high = min(xs), max(xs)

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        return round(self.left + share * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 1)

    def frame(self) -> str:
        parts = []
        for value in ticks(self.y_low, self.y_high, max(4, self.height // 50)):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text class="tick" x="{self.left - 6}" y="{y + 3.5}" text-anchor="end">{number(value)}</text>'
            )
        for value in ticks(self.x_low, self.x_high, max(2, self.width // 90)):
            if value == int(value):
                x, y = self.x(value), self.height - 6
                parts.append(f'<text class="tick" x="{x}" y="{y}" text-anchor="middle">{int(value)}</text>')
        return "".join(parts)


def _svg(width: int, height: int, label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _line(axes: _Axes, points: Series, css: str) -> str:
    if len(points) == 1:
        return f'<circle class="{css} dot" cx="{axes.x(points[0][0])}" cy="{axes.y(points[0][1])}" r="3"/>'
    path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in points)
    return f'<polyline class="{css}" points="{path}"/>'


def line_chart(
    label: str,
    points: Series,
    *,
    markers: Markers | None = None,
    width: int = 340,
    height: int = 150,
    zero: bool = False,
) -> str:
    """Draw a metric over steps: a thin line through the points, a thick running mean, ``markers`` as labelled diamonds.

    ``points`` or ``markers`` must not be empty.
    """
    points = thinned(points)
    marked = list(markers.points) if markers else []
    both = [*points, *marked]
    axes = _Axes(width, height, [x for x, _ in both], [y for _, y in both], zero=zero)
    body = [axes.frame()]
    if window(len(points)) > 1:
        body.append(_line(axes, points, "raw"))
    if points:
        body.append(_line(axes, smoothed(points), "mean"))
        for x, y in thinned(points, 120):  # tooltips
            body.append(
                f'<circle class="hit" cx="{axes.x(x)}" cy="{axes.y(y)}" r="5"><title>step {x}: '
                f"{number(y)}</title></circle>"
            )
    for x, y in marked:
        cx, cy = axes.x(x), axes.y(y)
        text = f"{y:.1%}" if markers and markers.percent else number(y)
        anchor = "start" if cx < width * 0.15 else "end" if cx > width * 0.85 else "middle"
        above = cy > 34
        title = f"{markers.label if markers else ''} at step {x}: {text}"
        body.append(
            f'<path class="mark" d="M{cx} {cy - 6}L{cx + 6} {cy}L{cx} {cy + 6}L{cx - 6} '
            f'{cy}Z"><title>{escape(title)}</title></path>'
        )
        body.append(
            f'<text class="value" x="{cx}" y="{cy - 11 if above else cy + 20}" text-anchor="{anchor}">{text}</text>'
        )
    spoken = f"{label} over steps"
    if points:
        spoken += f": {number(points[0][1])} at step {points[0][0]}, {number(points[-1][1])} at step {points[-1][0]}"
    return _svg(width, height, spoken, "".join(body))


def overlay_chart(
    label: str, curves: Mapping[str, Series], css: Mapping[str, str], *, width: int = 520, height: int = 220
) -> str:
    """Draw one metric of several runs; curves must not be empty. ``css``: the class of each run (``curve_css``)."""
    drawn = {name: smoothed(thinned(points)) for name, points in curves.items()}
    both = [point for points in drawn.values() for point in points]
    axes = _Axes(width, height, [x for x, _ in both], [y for _, y in both])
    body = [axes.frame()]
    for name, points in drawn.items():
        x, y = points[-1]
        title = escape(f"{name}: {number(y)} at step {x}")
        body.append(f"<g>{_line(axes, points, css[name])}<title>{title}</title></g>")
    return _svg(width, height, f"{label} of {', '.join(drawn)}", "".join(body))


def curve_css(i: int) -> str:
    """Return the CSS class of the i-th run's curve."""
    return f"run r{i % RUN_COLOURS}"


def stacked_chart(
    label: str, steps: Mapping[int, Mapping[str, float]], order: Sequence[str], *, width: int, height: int
) -> str:
    """Draw bars of seconds by step, one colour per phase, ``order`` from the bottom. Over 120 steps a bar is a mean of
    several."""
    numbers = list(steps)
    count = min(len(numbers), 120)
    bars = [numbers[i * len(numbers) // count : (i + 1) * len(numbers) // count] for i in range(count)]
    means = [{name: sum(steps[n].get(name, 0.0) for n in bar) / len(bar) for name in order} for bar in bars]
    axes = _Axes(width, height, [0.0, 1.0], [0.0, *(sum(m.values()) for m in means)], zero=True)
    axes.x_low, axes.x_high = numbers[0] - 0.5, numbers[-1] + 0.5
    body = [axes.frame()]
    for bar, mean in zip(bars, means, strict=True):
        left, right, base = axes.x(bar[0] - 0.5), axes.x(bar[-1] + 0.5), 0.0
        gap = min(1.5, (right - left) * 0.15)
        for name in order:
            top = base + mean[name]
            y, high = axes.y(top), axes.y(base) - axes.y(top)
            where = f"step {bar[0]}" if len(bar) == 1 else f"steps {bar[0]} to {bar[-1]}, mean"
            title = escape(f"{where}: {name} {mean[name]:.2f} s")
            box = f'x="{left + gap:.1f}" y="{y}" width="{right - left - 2 * gap:.1f}" height="{high:.1f}"'
            body.append(f'<rect class="{fill(name, waits=name in WAITING)}" {box}><title>{title}</title></rect>')
            base = top
    return _svg(width, height, label, "".join(body))


def lanes_chart(
    lanes: Sequence[tuple[str, Sequence[Sequence[TimedPhase]]]], start: float, end: float, steps: Mapping[int, float]
) -> str:
    """Draw one lane per process with its rows of phases between two times (unix seconds); waiting is hatched.

    ``steps``: number of a step -> its start time, drawn as a line through all lanes.
    """
    width, left, row, gap, top = 1040, 96, 22, 9, 22
    height = top + sum(row * max(1, len(rows)) + gap for _, rows in lanes) + 20
    scale = (width - left - 12) / (end - start)

    def x(moment: float) -> float:
        return left + (min(max(moment, start), end) - start) * scale

    body, y = [], top
    for name, rows in lanes:
        lane = row * max(1, len(rows))
        body.append(
            f'<text class="lane" x="{left - 10}" y="{y + lane / 2 + 4}" text-anchor="end">{escape(name)}</text>'
        )
        body.append(f'<rect class="track" x="{left}" y="{y}" width="{width - left - 12}" height="{lane}"/>')
        for i, phases in enumerate(rows):
            for phase in phases:
                if phase.end > start and phase.start < end:
                    waits = kind_of(name) is ProcessKind.TRAINER and phase.name in WAITING
                    body.append(_bar(phase, x(phase.start), x(phase.end), y + i * row, row, waits))
        y += lane + gap
    for number_, moment in steps.items():
        at = round(x(moment), 1)
        body.append(f'<line class="begin" x1="{at}" x2="{at}" y1="{top - 6}" y2="{y - gap}"/>')
        body.append(f'<text class="tick" x="{at + 4}" y="{top - 8}">step {number_}</text>')
    for seconds in ticks(0.0, end - start, 8):
        body.append(
            f'<text class="tick" x="{x(start + seconds):.1f}" y="{height - 6}" text-anchor="middle">{number(seconds)} '
            "s</text>"
        )
    return _svg(width, height, f"What every process did during {end - start:.1f} seconds", "".join(body))


def _bar(phase: TimedPhase, left: float, right: float, y: float, row: int, waits: bool) -> str:
    wide = max(right - left, 0.6)
    seconds = phase.end - phase.start
    title = escape(f"{phase.name}{' (waiting)' if waits else ''}: {seconds:.3f} s")
    box = f'x="{left:.1f}" y="{y + 1}" width="{wide:.1f}" height="{row - 2}"'
    text = ""
    if wide > 8 + 6.6 * len(phase.name):
        ink = "inkwait" if waits else "ink"
        text = (
            f'<text class="{ink}" x="{left + wide / 2:.1f}" y="{y + row / 2 + 4}" '
            f'text-anchor="middle">{escape(phase.name)}</text>'
        )
    return f'<g><title>{title}</title><rect class="{fill(phase.name, waits=waits)}" {box}/>{text}</g>'
