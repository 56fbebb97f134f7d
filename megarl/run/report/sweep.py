"""Table of the results of a sweep, from the files of its runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megarl.core.errors import ConfigError

HELD_OUT = ("val/accuracy", "val/loss")
"""Metric that a run is compared by: the first that it has."""


def runs_of(folder: Path) -> list[Path]:
    """Directories of the runs in a sweep's directory, by name."""
    return sorted(path.parent for path in folder.glob("*/resolved.json"))


def results(runs: Sequence[Path]) -> str:
    """A line for each run: its name, steps, held-out figure before and after. Raises ConfigError for no runs."""
    if not runs:
        raise ConfigError("no run has begun in this sweep")
    rows = [("run", "steps", "held out", "first", "last"), *map(_row, runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _row(run: Path) -> tuple[str, str, str, str, str]:
    records = list(_records(run / "metrics.jsonl"))
    trained = [record["step"] for record in records if any(name.startswith(("actor/", "train/")) for name in record)]
    steps = f"{max(trained, default=0):.0f}"
    for name in HELD_OUT:
        if values := [record[name] for record in records if name in record]:
            form = "{:.1%}" if name == "val/accuracy" else "{:.4f}"
            return run.name, steps, name.removeprefix("val/"), form.format(values[0]), form.format(values[-1])
    return run.name, steps, "—", "—", "—"


def _records(path: Path) -> Iterable[dict[str, float]]:
    """Lines of a run's metrics, but for one that a killed process left incomplete."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
