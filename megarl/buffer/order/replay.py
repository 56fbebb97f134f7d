"""Consumed groups that a step trains on again: a function of settings, seed, step and earlier use.

A group is replayed at the earliest k = ``sync.max_staleness`` steps after its first use: a step's new groups are
requested k steps ahead, and their number depends on the number of replayed groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megarl.buffer.order.draws import REPLAY
from megarl.buffer.store import Store, UsedGroup
from megarl.config import Config
from megarl.config.job import ReplayConfig


class Replayed(NamedTuple):
    """A group that a step trains on again."""

    group_id: str
    age: int
    """Steps since its first use."""
    uses: int
    """Steps that trained on it, including this one."""


class ReplayChoice:
    """Draws the replayed groups of each step."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config = config.buffer.replay
        self._count = self._config.num_groups(config.trainer.tasks_per_step)
        self._staleness = config.sync.max_staleness
        self._store = store

    def groups(self, step: int, seed: int, done: int) -> list[Replayed]:
        """Return the replayed groups of a step, up to ``buffer.replay.share``.

        The result does not depend on the time of the call: unrecorded steps in between are drawn again.

        Args:
            step: Steps done before the one that trains on them.
            seed: ``data_seed`` of the run's state.
            done: Steps recorded in the store, ``step`` - ``sync.max_staleness`` at least.
        """
        if not self._count:
            return []
        unrecorded: list[Replayed] = []
        for at in range(min(done, step), step + 1):  # each draw counts the uses of earlier draws
            oldest = at - self._config.max_age
            uses = Counter(self._store.replays.counts(oldest, min(done, at)))
            uses.update(group.group_id for group in unrecorded)
            found = self._store.replays.consumed(oldest, at - self._staleness)
            unrecorded += (replayed := drawn(found, uses, at, self._count, self._config, seed))
        return replayed


def drawn(
    groups: Sequence[UsedGroup], replays: Mapping[str, int], step: int, count: int, config: ReplayConfig, seed: int
) -> list[Replayed]:
    """Draw up to ``count`` of ``groups`` in proportion to their priority, without replacement.

    Priority: ``decay`` ^ age · (1 - accuracy) ^ ``hardness``. Computed in logarithms to avoid underflow.

    Args:
        groups: Candidates, in a fixed order.
        replays: Group id -> steps that have replayed it; 0 if missing.
        step: Steps done before.
    """
    noise = np.random.default_rng([seed, step, REPLAY]).standard_exponential(len(groups))
    ranked: list[tuple[float, int, Replayed]] = []
    for number, group in enumerate(groups):
        age, uses, wrong = step + 1 - group.used_by, 2 + replays.get(group.group_id, 0), 1.0 - group.accuracy
        if uses > config.uses or age > config.max_age or (config.hardness and not wrong):
            continue
        if config.min_accuracy <= group.accuracy <= config.max_accuracy:
            priority = age * np.log(config.decay) + (config.hardness and config.hardness * np.log(wrong))
            ranked.append((float(np.log(noise[number]) - priority), number, Replayed(group.group_id, age, uses)))
    return [replayed for _, _, replayed in sorted(ranked)[:count]]


def oldest_replayed(config: Config, starts: Collection[int]) -> int | None:
    """Return the first step whose groups may be replayed after one of ``starts``; None without replay."""
    replay = config.buffer.replay
    return min(starts) - replay.max_age + 1 if replay.share else None


def replay_metrics(replayed: Sequence[Replayed], groups: int) -> dict[str, float]:
    """Return metrics of a step with ``groups`` groups, ``replayed`` among them; ages and uses only if any are
    replayed."""
    metrics = {"replay/share": len(replayed) / max(groups, 1)}
    if replayed:
        ages, uses = [group.age for group in replayed], [group.uses for group in replayed]
        metrics |= {"replay/age/mean": sum(ages) / len(ages), "replay/age/max": float(max(ages))}
        metrics |= {"replay/uses/mean": sum(uses) / len(uses), "replay/uses/max": float(max(uses))}
    return metrics
