"""Deletes trajectories of used groups that a run no longer needs: whole groups, by filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megarl.buffer.order.replay import oldest_replayed
from megarl.buffer.store import Glance, Selection, StoredGroup
from megarl.buffer.store.selection import USED
from megarl.core.errors import ConfigError
from megarl.run.data.open_run import HEAD, StoredRun, TrajectoryTally, table
from megarl.weights.checkpoint.training.manifest import finished, in_order, steps_of

REPORTED = ("eval-before", "eval-after")
"""Evaluations with answers that the report shows."""
AT_ONCE = 200
"""Groups per transaction."""


@dataclass
class Pruned:
    """Result of a search for deletable trajectories."""

    tallies: dict[str, TrajectoryTally] = field(default_factory=dict)
    """Deletable trajectories by kind."""
    kept: Counter[str] = field(default_factory=Counter)
    """Reason -> number of groups that match the filters but are kept."""
    deleted: int = 0
    """Number of deleted trajectories."""

    def text(self, done: bool) -> str:
        """Return the table of deleted or deletable trajectories, and the reasons for kept groups."""
        rows = [[kind, *tally.cells()] for kind, tally in sorted(self.tallies.items())]
        lines = table([["deleted" if done else "to delete", *HEAD], *rows]) if rows else "nothing to delete\n"
        return lines + "".join(f"kept: {number} groups, {why}\n" for why, number in sorted(self.kept.items()))


def prune(run: StoredRun, selection: Selection, *, delete: bool) -> Pruned:
    """Find unneeded groups with only matching trajectories. With ``delete`` remove their trajectories, ``AT_ONCE``
    groups per transaction, so that a kill leaves whole groups and the same command can go on.

    Raises ConfigError for a bench, since its answers are its result.
    """
    if run.config.run.mode == "bench":
        raise ConfigError(f"{run.run_dir} belongs to a bench, which reads its answers again; remove the folder instead")
    found = Pruned()
    folder = run.run_dir / "checkpoints"
    steps, newest = steps_of(in_order(folder)), max(steps_of(finished(folder)), default=0)
    for groups in _in_parts(run, selection):
        kept = _needed(run, [group for group, _ in groups], steps, newest)
        found.kept.update(kept.values())
        free = [(group, members) for group, members in groups if group.group_id not in kept]
        for group, members in free:
            tally = found.tallies.setdefault(group.kind, TrajectoryTally())
            tally.groups += 1
            for glance in members:
                tally.add(glance)
        if delete and free:
            found.deleted += run.store.selection.delete_trajectories([group.group_id for group, _ in free])
    if found.deleted:
        groups_of = {kind: tally.groups for kind, tally in found.tallies.items()}
        run.store.journal.record_event("data", "prune", {"trajectories": found.deleted, "groups": groups_of})
    return found


Part = list[tuple[StoredGroup, list[Glance]]]


def _in_parts(run: StoredRun, selection: Selection) -> Iterator[Part]:
    """Yield, in parts, the groups whose trajectories exist and all match."""
    part: Part = []
    for group, members in run.glances(selection):
        if members and all(map(selection.matches, members)):
            part.append((group, members))
            if len(part) == AT_ONCE:
                yield part
                part = []
    if part:
        yield part


def _needed(run: StoredRun, groups: Sequence[StoredGroup], checkpoints: Sequence[int], newest: int) -> dict[str, str]:
    """Return group id -> reason to keep it. ``newest``: step of the newest finished one of the ``checkpoints``."""
    again = run.store.selection.needed_again(groups, checkpoints)
    oldest_replay = oldest_replayed(run.config, [*checkpoints, run.store.journal.last_step()])
    found: dict[str, str] = {}
    for group in groups:
        if group.state not in USED:
            found[group.group_id] = "which no step has used"
        elif group.kind == "eval":
            if group.rollout_id in REPORTED:
                found[group.group_id] = "which the report shows (eval-before, eval-after)"
        elif run.config.taskset.order == "prioritized":
            found[group.group_id] = "whose rewards taskset.order=prioritized reads at each start"
        elif group.at_step > newest:
            found[group.group_id] = f"used after the newest checkpoint (step {newest})"
        elif group.group_id in again:
            found[group.group_id] = "which a resume from an earlier checkpoint would use again"
        elif oldest_replay is not None and group.at_step >= oldest_replay:
            found[group.group_id] = f"which steps may train on again (buffer.replay, from step {oldest_replay} on)"
    return found
