"""Trajectories of a run's store: opened and counted."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tqdm import tqdm

from megarl.buffer.store import Glance, Selection, Store, StoredGroup
from megarl.config import Config, load_resolved
from megarl.core.errors import ConfigError, masked_text
from megarl.core.schema import End
from megarl.run.data.filters import check_sources
from megarl.run.job_store import store_of_run
from megarl.run.report.data import located, store_url
from megarl.tasks import ChatTokenizer


@dataclass(frozen=True)
class StoredRun:
    """A run with its open store."""

    run_dir: Path
    config: Config
    store: Store

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Tokenizer of the run's initial model. Raises CheckpointError if its files are missing."""
        return ChatTokenizer.open(located(self.config, self.run_dir, self.config.model.path))

    def glances(self, selection: Selection) -> Iterator[tuple[StoredGroup, list[Glance]]]:
        """Yield each group that matches the conditions on groups, with all its trajectories. Shows a progress bar."""
        total = self.store.selection.count(selection)
        with progress(total, "groups") as bar:
            for groups in self.store.selection.groups(selection):
                members: dict[str, list[Glance]] = {group.group_id: [] for group in groups}
                for glance in self.store.selection.glances(groups, ends=bool(selection.ends)):
                    members[glance.group.group_id].append(glance)
                yield from ((group, members[group.group_id]) for group in groups)
                bar.update(len(groups))

    def last_matching(self, selection: Selection, limit: int) -> tuple[list[StoredGroup], int]:
        """Return the last ``limit`` groups with a matching trajectory, in order, and the number of all such groups."""
        last, count = deque[StoredGroup](maxlen=limit), 0
        for group, members in self.glances(selection):
            if any(map(selection.matches, members)):
                last.append(group)
                count += 1
        return list(last), count


def progress(total: int, unit: str) -> tqdm[None]:
    """Return a progress bar for the terminal."""
    return tqdm(total=total, unit=f" {unit}", desc=unit, leave=False, disable=None, file=sys.stderr)


@contextmanager
def stored_run(run_dir: str | os.PathLike[str], selection: Selection, *, read_only: bool = True) -> Iterator[StoredRun]:
    """Open a run's store.

    Raises:
        ConfigError: there is no run or store, or no task has a source of ``selection``.
    """
    folder = Path(run_dir)
    if not (folder / "resolved.json").is_file():
        raise ConfigError(f"{folder} has no resolved.json; give the directory of a run, e.g. runs/quickstart")
    config = load_resolved(folder / "resolved.json")
    if (url := store_url(config, folder)) is None:
        raise ConfigError(
            f"{folder}: its store {masked_text(config.store.url)} does not exist; the run has no data yet"
        )
    with store_of_run(url, folder, read_only=read_only) as store:
        check_sources(selection, store)
        yield StoredRun(folder, config, store)


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
