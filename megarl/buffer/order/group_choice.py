"""Tasks of a step: sources by their weights and tasks of each source in order; and the groups that it trains on again.

The choice is a function of settings, step and seed. With ``prioritized`` it also depends on the groups that earlier
steps used.

A group is replayed at the earliest k = ``sync.max_staleness`` steps after its first use: a step's new groups are
requested k steps ahead, and their number depends on the number of replayed groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.buffer.order.draws import CURRICULUM, PRIORITY, REPLAY, SOURCE, extra_numbers, numbers_from
from megarl.buffer.store import Store, UsedGroup
from megarl.config import Config
from megarl.config.job import ReplayConfig
from megarl.core.errors import ConfigError, DataError
from megarl.tasks import difficulty_of, source_of, sources_of


@dataclass(frozen=True)
class Draw:
    """The tasks that a step takes from one source."""

    step: int
    """Steps done before this one."""
    start: int
    """Tasks taken from the source by earlier steps."""
    count: int
    extra: int
    """0 for the step's first rollout; 1, 2, … for rollouts added by dynamic sampling."""
    seed: int
    stream: tuple[int, ...] = ()
    """Random stream of the source."""


def shuffled(size: int, draw: Draw) -> list[int]:
    """Take tasks from a new permutation in every epoch."""
    first = numbers_from(size, draw.start, draw.count, draw.seed, *draw.stream)
    if not draw.extra:
        return first
    return extra_numbers(size, first, draw.step, draw.extra, draw.count, draw.seed, *draw.stream)


def in_file_order(size: int, draw: Draw) -> list[int]:
    """Take tasks in file order in every epoch."""
    return [(draw.start + draw.extra * draw.count + i) % size for i in range(draw.count)]


def curriculum(by_difficulty: Sequence[int], steps: int, draw: Draw) -> list[int]:
    """Choose randomly from the easiest; as ``shuffled`` after ``steps`` steps.

    Args:
        by_difficulty: All numbers, the easiest first.
        steps: Step s, counted from 1, chooses from the easiest s / ``steps``, and from at least as many as it takes.
    """
    size = len(by_difficulty)
    if draw.step >= steps:
        return shuffled(size, draw)
    reached = max(draw.count, -(-size * (draw.step + 1) // steps))
    random = np.random.default_rng([draw.seed, draw.step, CURRICULUM, *draw.stream])
    return _ranked([*random.permutation(by_difficulty[:reached]).tolist(), *by_difficulty[reached:]], draw)


def prioritized(weights: np.ndarray, draw: Draw) -> list[int]:
    """Choose randomly in proportion to ``weights`` (float64 [size], above 0), without replacement."""
    random = np.random.default_rng([draw.seed, draw.step, PRIORITY, *draw.stream])
    arrivals = random.standard_exponential(len(weights)) / weights
    return _ranked(np.argsort(arrivals, kind="stable").tolist(), draw)


def _ranked(ranking: Sequence[int], draw: Draw) -> list[int]:
    """Return the part of a step's ranking for a rollout; extra rollouts continue after the first."""
    first = draw.extra * draw.count
    return [ranking[i % len(ranking)] for i in range(first, first + draw.count)]


MAX_PARTS = 100_000
"""Largest sum of the sources' weights as whole numbers."""


class Shares:
    """Smooth weighted round robin over endless slots, one for each task of a run, in order.

    Among any P slots in a row, P the sum of the weights as smallest whole numbers, a source of weight w has w. So a
    step's number determines its sources and its position in each.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        parts = whole_parts(weights)
        self._order = np.array(_round_robin(parts), dtype=np.int64)
        taken = np.eye(len(parts), dtype=np.int64)[self._order].cumsum(axis=0)
        self._before = np.concatenate([np.zeros((1, len(parts)), np.int64), taken])

    def before(self, slot: int) -> list[int]:
        """Return the tasks of each source in all slots before ``slot``."""
        rounds, rest = divmod(slot, len(self._order))
        found: list[int] = (rounds * self._before[-1] + self._before[rest]).tolist()
        return found

    def of(self, start: int, count: int) -> list[int]:
        """Return the source number of each of ``count`` slots from ``start``."""
        found: list[int] = self._order[np.arange(start, start + count) % len(self._order)].tolist()
        return found

    def most(self, count: int) -> list[int]:
        """Return the most tasks of each source in any ``count`` consecutive slots."""
        period = len(self._order)
        rounds, rest = divmod(count, period)
        twice = np.concatenate([self._before, self._before[1:] + self._before[-1]])
        windows = twice[rest : rest + period] - twice[:period]
        found: list[int] = (rounds * self._before[-1] + windows.max(axis=0)).tolist()
        return found


def whole_parts(weights: Sequence[float]) -> list[int]:
    """Return the weights as smallest whole numbers, from their exact decimals: 0.5, 0.25 -> 2, 1.

    Raises:
        ConfigError: their sum exceeds ``MAX_PARTS``.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * common) for weight in exact]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) > MAX_PARTS:
        raise ConfigError(
            f"taskset.train: the weights {', '.join(f'{weight:g}' for weight in weights)} make {sum(parts)} parts, at "
            f"most {MAX_PARTS} are counted; give rounder numbers"
        )
    return parts


def _round_robin(parts: Sequence[int]) -> list[int]:
    """Return the sources of one round: each slot goes to the source with the largest deficit, the first on a tie."""
    lack, total = [0] * len(parts), sum(parts)
    order = []
    for _ in range(total):
        lack = [a + part for a, part in zip(lack, parts, strict=True)]
        chosen = max(range(len(parts)), key=lambda source: lack[source])
        lack[chosen] -= total
        order.append(chosen)
    return order


def tasks_per_step(config: Config) -> int:
    """Return the number of tasks sampled by a step that replays its full share."""
    groups = config.trainer.tasks_per_step
    return groups - config.buffer.replay.num_groups(groups)


class TaskChoice:
    """Chooses the training tasks of each step."""

    def __init__(self, config: Config, store: Store) -> None:
        self._taskset = config.taskset
        self.per_step = tasks_per_step(config)
        extra = config.algorithm.max_extra_rollouts if config.algorithm.dynamic_sampling else 0
        self._first_spare = 1 + extra
        self._staleness = config.sync.max_staleness
        self.store = store
        """Store with the tasks and the records of earlier steps."""
        self._sources = sources_of(config.taskset, "train")
        self._success: dict[str, float] = {}
        self._read_to = 0

    @cached_property
    def _ids(self) -> list[str]:
        return self.store.tasks.ids("train")

    @cached_property
    def _of_source(self) -> list[list[str]]:
        """Task ids of each source, in source order."""
        found: dict[str, list[str]] = {name: [] for name in self._sources}
        for task_id in self._ids:
            found[source_of(task_id) if len(found) > 1 or "" not in found else ""].append(task_id)
        return list(found.values())

    @cached_property
    def _shares(self) -> Shares:
        return Shares([source.weight for source in self._sources.values()])

    @cached_property
    def _difficulty(self) -> dict[str, float]:
        """Task id -> difficulty. Raises DataError."""
        key = self._taskset.difficulty
        assert key is not None, "checked before launch"
        found: dict[str, float] = {}
        for task in self.store.tasks.read("train", images=False):
            if (value := difficulty_of(task, key)) is None:
                raise DataError(f"task {task.task_id} has no number in extra_info.{key} (taskset.difficulty)")
            found[task.task_id] = value
        return found

    @cached_property
    def _by_difficulty(self) -> list[list[int]]:
        """Numbers of each source's tasks, the easiest first; ties in file order."""
        return [sorted(range(len(ids)), key=lambda i: self._difficulty[ids[i]]) for ids in self._of_source]

    def tasks(self, step: int, seed: int, extra: int = 0) -> list[str]:
        """Return task ids of a step's first rollout, or of its extra rollout number ``extra``.

        Args:
            step: Steps done before it.
            seed: ``data_seed`` of the run's state.
        """
        start = step * self.per_step
        slots = self._shares.of(start, self.per_step)
        before, counts = self._shares.before(start), Counter(slots)
        chosen = [
            iter(self._of_one(source, Draw(step, before[source], counts[source], extra, seed, self._stream(source))))
            for source in range(len(self._sources))
        ]
        return [next(chosen[source]) for source in slots]

    def with_spare(self, step: int, seed: int, count: int) -> list[str]:
        """Return task ids of a step's first rollout, and extra ones up to ``count`` if too few groups can be
        replayed."""
        tasks, extra = self.tasks(step, seed), self._first_spare
        while len(tasks) < count:
            tasks += self.tasks(step, seed, extra)
            extra += 1
        return tasks[:count]

    def _stream(self, source: int) -> tuple[int, ...]:
        """Return the random stream of a source; a single file keeps the original stream ``()``."""
        return () if "" in self._sources else (SOURCE, source + 1)

    def _of_one(self, source: int, draw: Draw) -> list[str]:
        ids = self._of_source[source]
        match self._taskset.order:
            case "shuffled":
                numbers = shuffled(len(ids), draw)
            case "file":
                numbers = in_file_order(len(ids), draw)
            case "curriculum":
                assert self._taskset.curriculum_steps is not None, "checked before launch"
                numbers = curriculum(self._by_difficulty[source], self._taskset.curriculum_steps, draw)
            case "prioritized":
                success = self._successes(draw.step)
                weights = [1.0 - success.get(task_id, 0.0) + self._taskset.priority_floor for task_id in ids]
                numbers = prioritized(np.array(weights), draw)
        return [ids[number] for number in numbers]

    def _successes(self, step: int) -> dict[str, float]:
        """Return task id -> share of right responses in its newest group. Only groups used before the tasks of ``step``
        could first be requested count, so the result does not depend on timing."""
        # In completion order, tasks of a step further ahead may be requested.
        last = min(step - self._staleness, self.store.journal.last_step())
        if last < self._read_to:  # the run was rolled back
            self._success, self._read_to = {}, 0
        if last > self._read_to:
            self._success |= self.store.groups.successes(self._read_to, last)
            self._read_to = last
        return self._success

    def metrics(self, step: int, task_ids: Sequence[str]) -> dict[str, float]:
        """Return metrics of the tasks of a step; ``{}`` for one file in shuffled order."""
        metrics: dict[str, float] = {}
        if "" not in self._sources:
            counts = Counter(map(source_of, task_ids))
            metrics |= {f"taskset/tasks/{name}": float(counts[name]) for name in self._sources}
        if self._taskset.difficulty is not None:
            metrics["taskset/difficulty"] = _mean([self._difficulty[task_id] for task_id in task_ids])
        if self._taskset.order == "prioritized":
            success = self._successes(step)
            metrics["taskset/success"] = _mean([success.get(task_id, 0.0) for task_id in task_ids])
            metrics["taskset/success_all"] = sum(success.values()) / len(self._ids)
            metrics["taskset/seen"] = len(success) / len(self._ids)
        return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


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
