"""Accuracy of a majority vote of k samples, as an expectation over all choices of k among n samples.

Choices are without replacement, as in pass@k. Samples without an answer do not vote. Ties are broken with equal
probability; without votes the result is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache


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
