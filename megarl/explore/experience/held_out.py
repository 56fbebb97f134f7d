"""Accuracy on held-out tasks with n answers each: avg@n, pass@k, standard errors, and verl's names for what it has too.

Answers to one task depend on each other, so the standard error is that of the tasks' means (clustered by task):
sqrt(sum((x - mean)^2) / (N (N - 1))) over N tasks.

Shape legend: N tasks, n answers to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from megarl.core.schema import Trajectory


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
    """k of pass@k: 2, 4, 8, ... and n itself, as verl's best@k."""
    yield from (2**i for i in range(1, n.bit_length()) if 2**i < n)
    yield n


def sampled_metrics(right: np.ndarray, n: int, sources: Sequence[str]) -> dict[str, float]:
    """Metrics of n > 1 answers to each task beside the accuracy; ``sources`` [N]: each task's data source."""
    shares = {"accuracy": right / n} | {f"pass@{k}": pass_at(k, right, n) for k in sizes(n)}
    errors = {f"val/{name}_se": standard_error(values) for name, values in shares.items()}
    metrics = {f"val/{name}": float(values.mean()) for name, values in shares.items() if name != "accuracy"}
    metrics |= {name: error for name, error in errors.items() if error is not None}
    for source in sorted(set(sources)):
        share = shares["accuracy"][[s == source for s in sources]]
        metrics[f"val-core/{source}/acc/mean@{n}"] = float(share.mean())
        # verl draws n of the n answers with replacement, 1,000 times; this is the mean of all such draws.
        metrics[f"val-core/{source}/acc/best@{n}/mean"] = float((1.0 - (1.0 - share) ** n).mean())
    return metrics
