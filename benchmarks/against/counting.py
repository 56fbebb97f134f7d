"""Counting up to a number that ends in 50: answers whose lengths have a long tail, for a model from scratch.

A question is ``Count from 31747 to 31750.``; the answer writes every number, then the last in a tag. Most answers are
short, and one in twenty is the longest. With megarl's tokenizer from scratch an answer has 6 tokens a number. Where to
end is plain from the number itself, so that a short warm start learns it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from megarl.tasks.generators.entries import Entries, Entry, Generator

OPTIONS = {"least": 2, "most": 38, "tail_percent": 100, "slip_percent": 70}
"""Fewest and most numbers of an answer; the exponent of the tail in percent (smaller: longer); share of the careless
teacher's demonstrations, whose last number in the tag is one too high."""


def numbers(dice: random.Random, options: Mapping[str, int]) -> int:
    """How many numbers an answer has: Pareto's distribution from ``least``, cut at ``most``."""
    drawn = options["least"] * dice.paretovariate(options["tail_percent"] / 100)
    return min(options["most"], int(drawn))


def entries(seed: int, options: Mapping[str, int]) -> Entries:
    """Endless counts of numbers with five digits."""
    dice = random.Random(seed)
    while True:
        last = dice.randrange(100, 1000) * 100 + 50
        first = last - numbers(dice, options) + 1
        written = " ".join(str(number) for number in range(first, last + 1))
        yield Entry(
            f"Count from {first} to {last}.",
            str(last),
            f"{written} <answer>{last}</answer>",
            f"{written} <answer>{last + 1}</answer>",
            "reasoning_gym/chain_sum",
        )


GENERATOR = Generator(entries, OPTIONS)
