"""Tasks of a step: sources by their weights, and tasks of each source in ``taskset.order``.

The choice is a function of settings, step and seed. With ``prioritized`` it also depends on the groups that earlier
steps used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megarl.buffer.order.draws import SOURCE
from megarl.buffer.order.orders import Draw, curriculum, in_file_order, prioritized, shuffled
from megarl.buffer.order.source_shares import Shares
from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.errors import DataError
from megarl.tasks import difficulty_of, source_of, sources_of


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
