"""Metrics of held-out tasks with n answers each: accuracy, avg@n, pass@k, standard errors, and the mean score of
answers with a verdict. Metrics that verl has too use verl's names.

Answers to one task depend on each other, so standard errors are computed from the tasks' means (clustered by task):
sqrt(sum((x - mean)^2) / (N (N - 1))) over N tasks.

Shape legend: N tasks, n answers to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.schema import Trajectory
from megarl.rewards.verdict import NO_VERDICT


@dataclass(frozen=True)
class TaskScores:
    """Scores of the answers to each task that have a verdict."""

    total: np.ndarray
    """float64 [N]"""
    number: np.ndarray
    """int64 [N]"""
    graded: bool
    """True if any score differs from 1 for a right answer or 0 for a wrong one."""

    @classmethod
    def of(cls, answers: Sequence[Trajectory], tasks: Sequence[str]) -> TaskScores:
        """Add up the scores of ``answers``."""
        number = {task: i for i, task in enumerate(tasks)}
        judged = [e for e in answers if e.reward.status not in NO_VERDICT]
        at = np.array([number[e.task_id] for e in judged], dtype=np.int64)
        scores = np.array([e.reward.score for e in judged], dtype=np.float64)
        right = np.array([e.reward.status == "ok" for e in judged], dtype=bool)
        n = len(tasks)
        return cls(np.bincount(at, scores, n), np.bincount(at, minlength=n), bool((scores != right).any()))

    def __add__(self, other: TaskScores) -> TaskScores:
        return TaskScores(self.total + other.total, self.number + other.number, self.graded or other.graded)

    def mean(self, which: np.ndarray | slice = slice(None)) -> float | None:
        """Return the mean score of the answers to some tasks; None without a verdict."""
        number = int(self.number[which].sum())
        return float(self.total[which].sum()) / number if number else None


def right_answers(answers: Sequence[Trajectory], tasks: Sequence[str]) -> np.ndarray:
    """int64 [N]: right answers to each task; one without a verdict counts as wrong."""
    number = {task: i for i, task in enumerate(tasks)}
    right = [number[e.task_id] for e in answers if e.reward.status == "ok"]
    return np.bincount(np.array(right, dtype=np.int64), minlength=len(tasks))


def standard_error(values: np.ndarray) -> float | None:
    """Standard error of the mean of the tasks' ``values`` [N]; None for a single task."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def pass_at(k: int, right: np.ndarray, n: int) -> np.ndarray:
    """float64 [N]: 1 - C(n - c, k) / C(n, k), the unbiased estimate that one of k answers is right (2107.03374)."""
    return np.array([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in right])


def sizes(n: int) -> Iterator[int]:
    """Yield the k of pass@k: 2, 4, 8, ... and n, as verl's best@k."""
    yield from (2**i for i in range(1, n.bit_length()) if 2**i < n)
    yield n


def source_metrics(right: np.ndarray, scores: TaskScores, n: int, sources: Sequence[str]) -> dict[str, float]:
    """Return the mean score, and accuracy and mean score of each data source (``sources`` [N]: each task's)."""
    metrics: dict[str, float | None] = {"val/score": scores.mean()}
    for source in sorted(set(sources)):
        mine = np.array([s == source for s in sources])
        metrics[f"val-core/{source}/acc/mean@{n}"] = float((right[mine] / n).mean())
        metrics[f"val-core/{source}/reward/mean@{n}"] = scores.mean(mine)
    return {name: value for name, value in metrics.items() if value is not None}


def accuracy_by_source(right: np.ndarray, n: int, labels: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Accuracy and number of tasks of each source; {} for a single one.

    Args:
        labels: [N]: each task's file name if ``taskset.eval`` has several files, else its data source.
    """
    if len(set(labels)) < 2:
        return {}
    masks = {label: np.array([each == label for each in labels]) for label in dict.fromkeys(labels)}
    return {label: (float((right[mine] / n).mean()), int(mine.sum())) for label, mine in masks.items()}


def sampled_metrics(right: np.ndarray, n: int, sources: Sequence[str]) -> dict[str, float]:
    """Return metrics of n > 1 answers to each task, except the accuracy; ``sources`` [N]: each task's data source."""
    shares = {"accuracy": right / n} | {f"pass@{k}": pass_at(k, right, n) for k in sizes(n)}
    errors = {f"val/{name}_se": standard_error(values) for name, values in shares.items()}
    metrics = {f"val/{name}": float(values.mean()) for name, values in shares.items() if name != "accuracy"}
    metrics |= {name: error for name, error in errors.items() if error is not None}
    for source in sorted(set(sources)):
        share = shares["accuracy"][[s == source for s in sources]]
        # verl draws n of the n answers with replacement, 1,000 times; this is the mean of all such draws.
        metrics[f"val-core/{source}/acc/best@{n}/mean"] = float((1.0 - (1.0 - share) ** n).mean())
    return metrics
