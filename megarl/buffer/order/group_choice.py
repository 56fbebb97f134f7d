"""Tasks of a step: sources by their weights, and tasks of each source in ``taskset.order``.

The choice is a function of settings, step and seed. That of ``prioritized`` also depends on the groups which earlier
steps have used, as the store has them.
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
    """Return the number of tasks that a step asks for which replays its whole share."""
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
        """Store with the tasks, and what became of earlier steps."""
        self._sources = sources_of(config.taskset, "train")
        self._success: dict[str, float] = {}
        self._read_to = 0

    @cached_property
    def _ids(self) -> list[str]:
        return self.store.tasks.ids("train")

    @cached_property
    def _of_source(self) -> list[list[str]]:
        """Ids of each source's tasks, by the source's number."""
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
        """Numbers of each source's tasks, the easiest first; equally hard ones in the file's order."""
        return [sorted(range(len(ids)), key=lambda i: self._difficulty[ids[i]]) for ids in self._of_source]

    def tasks(self, step: int, seed: int, extra: int = 0) -> list[str]:
        """Ids of the tasks of a step's first rollout, or of its ``extra``-th further one.

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
        """Ids of the tasks of a step's first rollout, and of further ones until there are ``count``: in place of
        groups that a step replays, where there are too few of them."""
        tasks, extra = self.tasks(step, seed), self._first_spare
        while len(tasks) < count:
            tasks += self.tasks(step, seed, extra)
            extra += 1
        return tasks[:count]

    def _stream(self, source: int) -> tuple[int, ...]:
        """A single file has the stream of jobs from before there were sources."""
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
        """Task id -> share of right responses in its newest group, of those that had been used when the tasks of
        ``step`` could first be asked for: the same whenever they are."""
        # In completion order tasks may be asked for that a step further ahead would have.
        last = min(step - self._staleness, self.store.journal.last_step())
        if last < self._read_to:  # the run has gone back
            self._success, self._read_to = {}, 0
        if last > self._read_to:
            self._success |= self.store.groups.successes(self._read_to, last)
            self._read_to = last
        return self._success

    def metrics(self, step: int, task_ids: Sequence[str]) -> dict[str, float]:
        """Metrics of the tasks that a step has asked for; none for one file in shuffled order."""
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
