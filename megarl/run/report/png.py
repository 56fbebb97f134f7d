"""The reward curve as PNG; for an offline job its losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.run.report import offline, svg
from megarl.run.report.data import ReportData
from megarl.run.report.text import status


def share_axis(rewards: Sequence[tuple[int, float]]) -> bool:
    """Return True if reward and accuracy fit one scale from 0 to 1."""
    return all(-0.01 <= v <= 1.01 for _, v in rewards)


def reward_png(run: ReportData, path: Path) -> None:
    if run.offline:
        return offline.png(run, path, f"{run.config.run.name}: {status(run)}")
    from matplotlib.figure import Figure

    rewards = run.series("critic/rewards/mean")
    shared = share_axis(rewards)
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots(1 if shared else 2, 1, sharex=True, squeeze=False)[:, 0]
    if rewards:
        axes[0].plot(*zip(*rewards, strict=True), color="#9dbbe2", linewidth=1, label="mean reward of a step")
        if svg.window(len(rewards)) > 1:
            label = f"running mean of {svg.window(len(rewards))} steps"
            axes[0].plot(*zip(*svg.smoothed(rewards), strict=True), color="#2563b8", linewidth=2, label=label)
    if run.accuracies:
        axes[-1].plot(*zip(*run.accuracies, strict=True), "D", color="#b4540a", label="held-out accuracy")
        for step, accuracy in run.accuracies:
            axes[-1].annotate(
                f"{accuracy:.1%}", (step, accuracy), (0, 7), textcoords="offset points", ha="center", fontsize=9
            )
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=9)
    if not rewards and not run.accuracies:
        axes[0].text(0.5, 0.5, "no step recorded yet", ha="center", va="center", transform=axes[0].transAxes)
    axes[-1].set_xlabel("step")
    axes[0].set_title(f"{run.config.run.name}: {status(run)}", fontsize=10, loc="left")
    figure.savefig(path, format="png")
