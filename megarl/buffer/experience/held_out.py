"""Metrics of held-out tasks: accuracy, avg@n, pass@k, majority votes, and confidence intervals.

Answers to one task depend on each other, so the mean of a task's answers is one observation. The interval is Student's
t with the standard error of the tasks' values. If every value is 0 or 1 it is Wilson's, which stays valid for few tasks
and near 0 and 1.

Choices are without replacement, as in pass@k. Samples without an answer do not vote. Ties are broken with equal
probability; without votes the result is wrong.

Metrics that verl has too use verl's names.

Answers to one task depend on each other, so standard errors are computed from the tasks' means (clustered by task):
sqrt(sum((x - mean)^2) / (N (N - 1))) over N tasks.

Shape legend: N tasks, n answers to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from megarl.core.schema import Trajectory
from megarl.rewards.verdict import NO_VERDICT

Z = 1.959963984540054
"""Quantile 0.975 of the normal distribution."""


@dataclass(frozen=True)
class Interval:
    """A mean over tasks with its confidence interval."""

    mean: float
    low: float | None
    """None if all values are equal and neither 0 nor 1: an interval of width 0 would claim too much."""
    high: float | None
    tasks: int

    @property
    def excludes_zero(self) -> bool:
        """True if the whole interval is above 0 or below 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def t_quantile(freedom: int) -> float:
    """Quantile 0.975 of Student's t: exact for 1 and 2 degrees of freedom, else by Hill's expansion (CACM 396)."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2.0 / (1.0 - 0.95**2))
    a = 1.0 / (freedom - 0.5)
    b = 48.0 / a**2
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * freedom
    y = (d * 0.05) ** (2.0 / freedom)
    if y > 0.05 + a:
        x = -Z
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (
                1.0 / (((freedom + 6.0) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2.0) * 3.0)
                + 0.5 / (freedom + 4.0)
            )
            * y
            - 1.0
        ) * (freedom + 1.0) / (freedom + 2.0) + 1.0 / y
    return math.sqrt(freedom * y)


def interval(values: np.ndarray) -> Interval:
    """Return the mean of the tasks' ``values`` [N] with its interval."""
    if bool(np.isin(values, (0.0, 1.0)).all()):
        return _wilson(int(values.sum()), len(values))
    return _student(values)


def paired(first: np.ndarray, second: np.ndarray) -> Interval:
    """Return the mean of ``second`` - ``first`` [N] on the same tasks, with its interval."""
    return _student(second - first)


def _student(values: np.ndarray) -> Interval:
    mean, n = float(values.mean()), len(values)
    if bool((values == values[0]).all()):
        return Interval(mean, None, None, n)
    half = t_quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def _wilson(right: int, n: int) -> Interval:
    share, z2 = right / n, Z * Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(share, 0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half, n)


def majority_at(k: int, votes: Sequence[tuple[int, int]], n: int) -> float:
    """Probability that the majority of k of n samples is right. Exact, by integer counting.

    Args:
        votes: (samples with this answer, right ones among them) for each answer; the other samples gave none.
    """
    counts = tuple(sorted(count for count, _ in votes))
    silent = n - sum(counts)
    assert 1 <= k <= n and silent >= 0, (k, n, votes)
    shares = [
        Fraction(right, count) * _wins(k, count, _without(counts, count), silent) for count, right in votes if right
    ]
    return float(sum(shares, Fraction(0)) / math.comb(n, k))


def _without(counts: tuple[int, ...], one: int) -> tuple[int, ...]:
    place = counts.index(one)
    return counts[:place] + counts[place + 1 :]


@lru_cache(maxsize=4096)
def _wins(k: int, count: int, others: tuple[int, ...], silent: int) -> Fraction:
    """Return the number of choices of k samples won by an answer that ``count`` samples give; a tie of t answers counts
    1/t."""
    total = Fraction(0)
    for chosen in range(1, min(count, k) + 1):
        # ways[samples taken of others][answers that tie], with no other answer chosen more often than this one
        ways: dict[tuple[int, int], int] = {(0, 0): 1}
        for other in others:
            ways = _with_answer(ways, other, chosen, k - chosen)
        of_answer = math.comb(count, chosen)
        for (taken, ties), number in ways.items():
            total += Fraction(of_answer * number * math.comb(silent, k - chosen - taken), ties + 1)
    return total


def _with_answer(ways: dict[tuple[int, int], int], size: int, most: int, room: int) -> dict[tuple[int, int], int]:
    """Return the choices with up to ``most`` further samples from an answer that ``size`` samples give."""
    found: dict[tuple[int, int], int] = {}
    for (taken, ties), number in ways.items():
        for more in range(min(size, most, room - taken) + 1):
            key = taken + more, ties + (more == most)
            found[key] = found.get(key, 0) + number * math.comb(size, more)
    return found


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
