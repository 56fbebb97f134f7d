"""Confidence intervals of means over tasks: 95 %, and of paired differences between two models.

Answers to one task depend on each other, so the mean of a task's answers is one observation. The interval is Student's
t with the standard error of the tasks' values. If every value is 0 or 1 it is Wilson's, which stays valid for few tasks
and near 0 and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

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
