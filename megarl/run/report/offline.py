"""Report of a job without rollouts: loss and share of preferred chosen answers, on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.run.report import svg
from megarl.run.report.data import EvaluationResult, ReportData, Series

WIDTH, HEIGHT = 1060, 290
LOSS = "actor/loss"


def change(run: ReportData, *, by_accuracy: bool) -> str | None:
    """Return ``0.693 → 0.512``; None before the first evaluation."""
    values = [accuracy(e) if by_accuracy else loss(e) for e in (run.before, run.after) if e is not None]
    return " → ".join(values) if values else None


def loss(evaluation: EvaluationResult | None) -> str:
    return "—" if evaluation is None or evaluation.loss is None else svg.number(evaluation.loss)


def accuracy(evaluation: EvaluationResult | None) -> str:
    return "—" if evaluation is None or evaluation.accuracy is None else f"{evaluation.accuracy:.1%}"


def table(run: ReportData) -> list[tuple[str, ...]]:
    """Return a header row and a row per evaluation; demonstrations have no column of preferences."""
    found = [("", "after step", "loss", "chosen preferred")]
    for label, e in (("before", run.before), ("after", run.after)):
        found.append((label, "—" if e is None or e.step is None else str(e.step), loss(e), accuracy(e)))
    return [row if run.accuracies else row[:3] for row in found]


def charts(run: ReportData) -> str:
    """Return the chart of training and held-out loss and, for preferences, the share of preferred chosen answers."""
    markers = svg.Markers("held-out loss", run.losses, percent=False)
    drawn = svg.line_chart("Loss", run.series(LOSS), markers=markers, width=WIDTH, height=HEIGHT)
    if run.accuracies:
        markers = svg.Markers("held-out, chosen preferred", run.accuracies)
        points = run.series("rewards/accuracies")
        drawn += svg.line_chart(
            "Chosen answer preferred", points, markers=markers, width=WIDTH, height=HEIGHT, zero=True
        )
    return drawn


def png(run: ReportData, path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    lines: list[tuple[str, Series, Sequence[tuple[int, float]]]] = [("loss", run.series(LOSS), run.losses)]
    if run.accuracies:
        lines.append(("chosen preferred", run.series("rewards/accuracies"), run.accuracies))
    axes = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (label, trained, held_out) in zip(axes, lines, strict=True):
        if trained:
            ax.plot(*zip(*trained, strict=True), color="#9dbbe2", linewidth=1, label=f"{label}, of a step")
        ax.plot(*zip(*held_out, strict=True), "D", color="#b4540a", label=f"{label}, held out")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=9)
    axes[-1].set_xlabel("step")
    axes[0].set_title(title, fontsize=10, loc="left")
    figure.savefig(path, format="png")
