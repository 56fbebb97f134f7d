"""A run's store, opened with the settings and tokenizer of its trajectories."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tqdm import tqdm

from megarl.buffer.store import Glance, Selection, Store, StoredGroup
from megarl.config import Config, load_resolved
from megarl.core.errors import ConfigError, masked_text
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
