"""A step's groups against the store's own rows: use, number, staleness, order and seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from megarl.buffer.order.draws import data_seed
from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.tasks import sources_of
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.group_part import rollout_id


class StoredGroups(Part):
    """Compares, on rank 0, what a step trains on with the rows of the store, read by queries of their own."""

    def __init__(self, config: Config, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._config, self._store, self._reporter = config, store, reporter
        self._is_first, self._from_start = context.rank == 0, True
        self._found: dict[str, str] = {}
        self._logged: list[str] = []
        """Metrics of the alarms that the step has logged."""
        self._order: list[str] = []
        self._seeds: dict[int, str] = {}
        """Sampling seed -> the rollout that has it."""
        self._read_to = 0

    def begin(self, state: TrainState) -> None:
        if not self._is_first or not self._from_start:
            return
        self._from_start, last = False, self._store.facts.last_step()
        if state.step > last:
            self._found["step-gap"] = f"the run goes on after step {state.step}, and the last recorded step is {last}"
            self._log(state.step + 1)

    def before_batch(self, state: TrainState, data: StepData) -> None:
        if not self._is_first:
            return
        config, facts, groups = self._config, self._store.facts, data.groups
        ids = {one.group_id for one in data.trajectories}
        replayed = set(groups.used.replayed)
        rows = facts.groups({one.rollout_id for one in data.trajectories})
        again = [row for row in rows if row.group_id in ids - replayed and row.used_by is not None]
        if again:
            self._found["twice"] = f"group {again[0].group_id} was used by step {again[0].used_by} before"
        wanted = config.trainer.tasks_per_step
        if groups.report.groups + len(replayed) < wanted and config.reward.late_steps is None:
            self._found["missing-groups"] = (
                f"{groups.report.groups} new and {len(replayed)} used groups were read, and a step has {wanted}"
            )
        new = [one for one in data.trajectories if one.group_id not in replayed]
        lags = Counter[tuple[str, int]]()
        if groups.lags is not None:
            tokens = tokens_of_versions(new)
            lags = lags_of(tokens, facts.steps_of_versions(tokens), state.step)
        given = {str(version): lag for version, lag in (groups.lags or {}).items()}
        self._found |= wrong_lags(lags, given, config.sync.max_staleness)
        self._compare_order(state, [row.task_id for row in rows if row.rollout_id == rollout_id(state.step)])
        self._compare_seeds()
        self._log(state.step + 1)

    def _compare_order(self, state: TrainState, tasks: Sequence[str]) -> None:
        config = self._config
        self._order = self._order or self._store.facts.task_order()
        number = len(tasks)
        if number > 1 and len(self._order) >= number and len(set(tasks)) == 1:
            self._found["data-order"] = f"all {number} groups of the step are of task {tasks[0]}"
        is_plain = config.taskset.order == "shuffled" and len(sources_of(config.taskset, "train")) == 1
        if not is_plain or state.rollbacks or config.sync.order != "admission" or not tasks:
            return
        count = config.trainer.tasks_per_step
        if config.buffer.replay.num_groups(count):
            return
        expected = tasks_in_order(self._order, state.step * count, count, data_seed(config.trainer.seed, 0))
        if list(tasks[:count]) != expected:
            at = next(i for i, task in enumerate(expected) if i >= number or tasks[i] != task)
            self._found["data-order"] = (
                f"task {at + 1} of the step is {tasks[at] if at < number else 'missing'}, and in the order of the seed "
                f"{expected[at]}"
            )

    def _compare_seeds(self) -> None:
        for sequence, rollout, seed in self._store.facts.seeds(self._read_to):
            self._read_to = sequence
            if seed is None:
                continue
            if self._seeds.get(seed, rollout) != rollout:
                self._found["repeated-seeds"] = f"rollouts {self._seeds[seed]} and {rollout} have the seed {seed}"
            self._seeds[seed] = rollout

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        metrics |= dict.fromkeys(self._logged, 1.0)
        self._logged.clear()

    def _log(self, step: int) -> None:
        """Log what was found at once: the step may end with an error that the same cause brings about."""
        for name, text in self._found.items():
            self._logged.append(f"alarm/{name}")
            self._reporter.log(f"alarm {name}: step {step}: {text}; look at {LOOK_AT[name]}")
        self._found.clear()


LOOK_AT = {
    "step-gap": "the state of the checkpoint that was resumed from",
    "twice": "what chooses a step's groups, and whether their use was recorded",
    "missing-groups": "groups that failed, and what reads the groups of a step",
    "lag": "the versions that engines report, and the steps that are recorded for them",
    "stale": "sync.max_staleness, and what drops groups beyond it",
    "data-order": "taskset.order, the seed, and the number of steps that the order begins at",
    "repeated-seeds": "what makes the seed of a step's sampling, above all after a resume",
}


def tasks_in_order(ids: Sequence[str], start: int, count: int, seed: int) -> list[str]:
    """Return ``count`` tasks from position ``start`` of the order of ``taskset.order=shuffled``: a new permutation of
    all tasks for each epoch."""
    places = [divmod(at, len(ids)) for at in range(start, start + count)]
    return [ids[int(_permutation(len(ids), seed, epoch)[at])] for epoch, at in places]


@lru_cache(2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


def tokens_of_versions(trajectories: Sequence[Trajectory]) -> Counter[str]:
    """Return version -> tokens sampled with it."""
    tokens: Counter[WeightsVersion] = Counter()
    for one in trajectories:
        for turn in one.turns:
            for span in turn.spans:
                tokens[span.version] += span.end - span.start
    return Counter({str(version): number for version, number in tokens.items()})


def lags_of(tokens: Mapping[str, int], steps: Mapping[str, int], step: int) -> Counter[tuple[str, int]]:
    """Return (version, lag) -> tokens, for versions with known steps."""
    return Counter({(name, step - steps[name]): number for name, number in tokens.items() if name in steps})


def wrong_lags(tokens: Counter[tuple[str, int]], given: Mapping[str, int], most: int) -> dict[str, str]:
    """Return alarm -> text where a version's lag is not the one that the step uses, or is above the limit."""
    found: dict[str, str] = {}
    for (version, lag), number in tokens.items():
        if given.get(version, 0) != lag:
            found["lag"] = (
                f"{number} tokens of version {version} have lag {lag} by the store and {given.get(version, 0)} here"
            )
        if lag > most:
            found["stale"] = f"{number} tokens of version {version} have lag {lag}, above sync.max_staleness={most}"
    return found
