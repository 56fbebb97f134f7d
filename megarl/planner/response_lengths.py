"""Lengths of responses as a lognormal distribution that a cap truncates: mean, mean context, longest of many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Self

NORMAL = NormalDist()
SIGMA = 0.7
"""Standard deviation of a response's log length where only the mean is known. Runs of reasoning models have 0.5 to 1;
a run's own record replaces it."""
POINTS = 400
"""Quantiles that stand for the distribution."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses: exp(normal(mu, sigma)), at most ``cap``."""

    mu: float
    sigma: float
    cap: int

    @classmethod
    def of_mean(cls, mean: float, cap: int, sigma: float = SIGMA) -> Self:
        """Return the distribution whose truncated mean is ``mean``. A mean near the cap makes all lengths the mean."""
        if mean >= 0.97 * cap:
            return cls(math.log(mean), 0.0, max(cap, math.ceil(mean)))
        low, high = math.log(max(mean, 1)) - 3 * sigma, math.log(cap) + 6 * sigma
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma, cap).mean < mean else (low, middle)
        return cls(low, sigma, cap)

    @classmethod
    def of_quantiles(cls, p50: float, p99: float, most: int) -> Self:
        """Return the distribution with a median and a 99th percentile, truncated at ``most``."""
        return cls(math.log(p50), max(0.0, math.log(p99 / p50)) / NORMAL.inv_cdf(0.99), most)

    @cached_property
    def quantiles(self) -> list[float]:
        """Lengths at ``POINTS`` equally likely quantiles, from the shortest."""
        if not self.sigma:
            return [min(math.exp(self.mu), self.cap)] * POINTS
        steps = ((n + 0.5) / POINTS for n in range(POINTS))
        return [min(math.exp(self.mu + self.sigma * NORMAL.inv_cdf(q)), self.cap) for q in steps]

    @cached_property
    def mean(self) -> float:
        """Mean of the truncated lengths."""
        return sum(self.quantiles) / POINTS

    def context(self, prompt: float) -> float:
        """Return the mean number of tokens that a token of prompt and response attends to."""
        totals = [prompt + length for length in self.quantiles]
        return sum(t * t for t in totals) / (2 * sum(totals))

    def longest(self, number: int) -> float:
        """Return the length that the longest of ``number`` responses has in the median."""
        if not self.sigma or number < 2:
            return self.quantiles[-1] if not self.sigma else min(math.exp(self.mu), self.cap)
        return min(math.exp(self.mu + self.sigma * NORMAL.inv_cdf(0.5 ** (1 / number))), self.cap)
