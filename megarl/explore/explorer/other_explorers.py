"""One explorer among others: its share of their limits and of held-out tasks, and the lease of its claims."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.buffer.experience.held_out import (
    TaskScores,
    accuracy_by_source,
    right_answers,
    sampled_metrics,
    source_metrics,
    standard_error,
)
from megarl.buffer.store import Store
from megarl.buffer.store.engines import Silence
from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.rewards.pool.process import addresses
from megarl.rewards.verdict import NO_VERDICT
from megarl.tasks import source_of


def record_evaluations(store: Store, worker: str, rollout_id: str | None = None) -> None:
    """Record the event of every evaluation with all groups ready, and mark the groups consumed.

    Safe to repeat, also after a kill: recorded groups are no longer ready.

    Args:
        rollout_id: Only this evaluation.
    """
    for found, step, samples in store.evaluations.to_count(rollout_id):
        store.journal.record_evaluation(worker, found, evaluated(store, found, step, samples))


def evaluated(store: Store, rollout_id: str, step: int, samples: int) -> dict[str, Any]:
    """Return the data of an evaluation's event: counts, accuracy with its standard error, mean score, and
    ``metrics``."""
    sources = store.rollouts.task_sources(rollout_id)
    tasks = list(sources)
    right, errors = np.zeros(len(tasks), dtype=np.int64), 0
    scores = TaskScores.of([], tasks)
    for part in store.groups.parts(store.groups.ids(rollout_id)):  # never all answers at once
        answers = store.groups.read(part)
        right += right_answers(answers, tasks)
        scores += TaskScores.of(answers, tasks)
        errors += sum(e.reward.status in NO_VERDICT for e in answers)
    answered = len(tasks) * samples
    metrics = {"val/accuracy": int(right.sum()) / answered, "val/error_rate": errors / answered}
    metrics |= source_metrics(right, scores, samples, list(sources.values()))
    if samples > 1:
        metrics |= sampled_metrics(right, samples, list(sources.values()))
    labels = [source_of(task) or data_source for task, data_source in sources.items()]
    by_source = accuracy_by_source(right, samples, labels)
    metrics |= {f"val/accuracy/{label}": accuracy for label, (accuracy, _) in by_source.items()}
    event = {
        "rollout_id": rollout_id,
        "step": step,
        "accuracy": metrics["val/accuracy"],
        "samples": samples,
        "standard_error": standard_error(right / samples),
        "tasks": len(tasks),
        "right": int(right.sum()),
        "errors": errors,
        "score": metrics.get("val/score"),
        "graded": scores.graded,
        "metrics": metrics,
        "sources": by_source,
    }
    if samples > 1:
        event |= {"pass": metrics[f"val/pass@{samples}"], "pass_standard_error": metrics.get(f"val/pass@{samples}_se")}
    return event


def check_explorers(config: Config) -> None:
    """Raise ConfigError if an explorer would have no group or no reward worker."""
    number, workers = config.rollout.explorers, config.reward.workers
    if number > workers:
        raise ConfigError(
            f"rollout.explorers={number}: each needs a separate reward worker, but reward.workers={workers}; raise "
            "that, or have fewer explorers"
        )
    if number > config.rollout.concurrent_groups:
        raise ConfigError(
            f"rollout.explorers={number} share rollout.concurrent_groups={config.rollout.concurrent_groups}; raise "
            "that, or have fewer explorers"
        )


def share_of(config: Config, hosts: Sequence[str], number: int) -> Config:
    """Return the settings of explorer ``number``: its part of groups in flight, reward workers, and requests to judge
    and teachers.

    Args:
        hosts: Reward hosts of the job's other nodes, in addition to ``reward.hosts``.
    """
    reward, explorers = config.reward, config.rollout.explorers

    def part(whole: int) -> int:
        return max(1, len(range(number, whole, explorers)))

    judge = replace(reward.judge, concurrency=part(reward.judge.concurrency))
    own = replace(
        reward,
        workers=part(reward.workers),
        hosts=addresses([*reward.hosts, *hosts])[number::explorers],
        backlog=part(reward.backlog),
        judge=judge,
    )
    groups = part(config.rollout.concurrent_groups)
    teachers = {name: replace(each, concurrency=part(each.concurrency)) for name, each in config.teachers.items()}
    rollout = replace(config.rollout, concurrent_groups=groups)
    return replace(config, reward=own, rollout=rollout, teachers=teachers)


BEATS = 4
"""Heartbeats of an explorer per heartbeat timeout."""


class Lease:
    """Sends an explorer's heartbeats and detects dead explorers, whose groups become free.

    Args:
        call: Calls a function of the store in the store's thread.
        silence_s: Silence after which a worker counts as dead.
    """

    def __init__(
        self, store: Store, worker: str, call: Callable[..., Awaitable[Any]], silence_s: float, beats: int = BEATS
    ) -> None:
        self._store, self._worker, self._call = store, worker, call
        self._silence_s, self._every_s = silence_s, silence_s / beats
        self._others = Silence(self._every_s)

    @property
    def silent(self) -> Collection[str]:
        """Names of workers found dead at the last look."""
        return self._others.longer_than(self._silence_s)

    async def keep(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await self._call(self._store.workers.beat, self._worker)
            self._others.look(await self._call(self._store.workers.beats))
            if self.silent:  # a dead explorer may have left an uncounted evaluation
                await self._call(record_evaluations, self._store, self._worker)
            await asyncio.sleep(self._every_s)
