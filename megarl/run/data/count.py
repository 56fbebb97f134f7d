"""Counts of a run's trajectories, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megarl.buffer.store import Glance, Selection, Store
from megarl.core.schema import End
from megarl.run.data.open_run import StoredRun

KEYS: dict[str, Callable[[Glance], str | int]] = {
    "kind": lambda glance: glance.group.kind,
    "step": lambda glance: glance.group.at_step,
    "source": lambda glance: glance.group.data_source or "(unknown)",
    "state": lambda glance: glance.group.state + (f" ({glance.group.reason})" if glance.group.reason else ""),
    "status": lambda glance: glance.status,
    "end": lambda glance: str(glance.end),
}
"""Value of ``--by`` -> key that trajectories are counted by."""


@dataclass
class TrajectoryTally:
    """Sums over trajectories of one key."""

    groups: int = 0
    trajectories: int = 0
    right: int = 0
    verdicts: int = 0
    score: float = 0.0
    nbytes: int = 0

    def add(self, glance: Glance) -> None:
        """Count one trajectory."""
        self.trajectories += 1
        self.right += glance.status == "ok"
        self.verdicts += glance.score is not None
        self.score += glance.score or 0.0
        self.nbytes += glance.nbytes

    def cells(self) -> list[str]:
        """Return the cells of the table's row."""
        mean = f"{self.score / self.verdicts:.4f}" if self.verdicts else "—"
        right = f"{self.right / self.trajectories:.1%}" if self.trajectories else "—"
        counts = [str(self.groups), str(self.trajectories), right, mean]
        return [*counts, str(self.trajectories - self.verdicts), f"{self.nbytes / 1e6:.1f}"]


HEAD = ["groups", "trajectories", "right", "mean reward", "no verdict", "MB of tokens"]


def count(run: StoredRun, selection: Selection, by: str) -> str:
    """Return the table of matching trajectories, with a row for each value of ``by``. A group counts in each row with
    one of its trajectories."""
    tallies: dict[str | int, TrajectoryTally] = {}
    reading = replace(selection, ends=selection.ends or tuple(End)) if by == "end" else selection
    everything = TrajectoryTally()
    for _, members in run.glances(reading):
        found = [glance for glance in members if reading.matches(glance)]
        for glance in found:
            tallies.setdefault(KEYS[by](glance), TrajectoryTally()).add(glance)
            everything.add(glance)
        for key in {KEYS[by](glance) for glance in found}:
            tallies[key].groups += 1
        everything.groups += bool(found)
    rows = [[str(key), *tallies[key].cells()] for key in sorted(tallies)]
    return table([[by, *HEAD], *rows, ["all", *everything.cells()]])


def count_experts(store: Store) -> str:
    """Return the table of imports of expert rows."""
    rows = [
        [str(each.number), "taskset.expert" if each.by_setting else "import", each.source, str(each.stored)]
        for each in store.experts.imports()
    ]
    return table([["import", "by", "source", "rows"], *rows, ["all", "", "", str(store.experts.count())]])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as text: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))]) for row in rows
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)
