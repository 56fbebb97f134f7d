"""Accuracy of the answer that most of k samples give, as an expectation over all choices of k among n samples.

A choice is without replacement, as in pass@k. Samples that give no answer do not vote. Of several answers that are
given most often each is taken with the same probability; where nobody votes, nothing is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache


def majority_at(k: int, votes: Sequence[tuple[int, int]], n: int) -> float:
    """Probability that the majority of k of n samples is right. Exact: integers are counted, not draws.

    Args:
        votes: (times that an answer was given, right ones of them) of each answer; the other samples gave none.
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
    """Number of choices of k samples in which an answer that ``count`` of them give is the majority; a tie of t answers
    counts 1/t."""
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
    """Choices with up to ``most`` further samples, those of an answer that ``size`` samples give."""
    found: dict[tuple[int, int], int] = {}
    for (taken, ties), number in ways.items():
        for more in range(min(size, most, room - taken) + 1):
            key = taken + more, ties + (more == most)
            found[key] = found.get(key, 0) + number * math.comb(size, more)
    return found
