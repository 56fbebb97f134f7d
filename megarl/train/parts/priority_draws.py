"""Tasks of ``taskset.order=prioritized`` against the draw that the store's results give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.buffer.order.draws import PRIORITY, data_seed
from megarl.buffer.store import Store
from megarl.config import Config
from megarl.tasks import sources_of
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.group_part import rollout_id


class PriorityDraws(Part):
    """Draws, on rank 0, the tasks of each step again, from rows that queries of its own read."""

    def __init__(self, config: Config, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._config, self._store, self._reporter = config, store, reporter
        is_plain = config.sync.order == "admission" and len(sources_of(config.taskset, "train")) == 1
        self._is_due = is_plain and not config.buffer.replay.num_groups(config.trainer.tasks_per_step)
        self._is_due = self._is_due and context.rank == 0
        self._ids: list[str] = []
        self._shares: dict[str, float] = {}
        self._read_to = 0
        self._found = False

    def before_batch(self, state: TrainState, data: StepData) -> None:
        if not self._is_due or state.rollbacks:
            return
        facts, config = self._store.facts, self._config
        self._ids = self._ids or facts.task_order()
        count = config.trainer.tasks_per_step
        own = rollout_id(state.step)
        tasks = [row.task_id for row in facts.groups([own])][:count]
        last = state.step - config.sync.max_staleness
        if last > self._read_to:
            self._shares |= facts.right_shares(self._read_to, last)
            self._read_to = last
        seed = data_seed(config.trainer.seed, 0)
        wanted = drawn(self._ids, self._shares, config.taskset.priority_floor, [seed, state.step, PRIORITY])[:count]
        if tasks and tasks != wanted:
            at = next((i for i, task in enumerate(tasks) if i >= len(wanted) or wanted[i] != task), 0)
            self._found = True
            self._reporter.log(
                f"alarm priorities: step {state.step + 1}: task {at + 1} is {tasks[at]}, and by the results of earlier "
                f"steps {wanted[at]}; look at what gives results to the choice of tasks"
            )

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if self._found:
            metrics["alarm/priorities"], self._found = 1.0, False


def drawn(ids: Sequence[str], shares: Mapping[str, float], floor: float, seed: Sequence[int]) -> list[str]:
    """Return all tasks in the order of a draw without replacement, with weights 1 - share + floor.

    An exponential time with a task's weight as its rate passes until the task is drawn.
    """
    weights = np.array([1.0 - shares.get(task, 0.0) + floor for task in ids])
    times = np.random.default_rng(list(seed)).standard_exponential(len(ids)) / weights
    return [ids[int(i)] for i in np.argsort(times, kind="stable")]
