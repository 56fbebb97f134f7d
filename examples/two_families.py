"""Rows of two families of tasks: sums of two numbers (``add``), and a number's digits backwards (``turn``).

Options: ``family`` is 0 for both in turn, 1 for sums alone, 2 for digits alone. ``careless_percent`` of the responses
have a wrong last digit. Used by `experiment=families` and `experiment=distill_two` (docs/distillation.md).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from megarl.config.bounds import Bound
from megarl.tasks.generators.entries import Entries, Entry, Generator, slipped

SUMS, DIGITS = "sums", "digits"


def entries(seed: int, options: Mapping[str, int]) -> Entries:
    """Yield entries without end; the same seed yields the same."""
    draw = random.Random(seed)
    for number in itertools.count():
        if (options["family"] or 1 + number % 2) == 1:
            a, b = draw.randrange(100), draw.randrange(100)
            question, answer, source = f"add {a} {b} =", str(a + b), SUMS
        else:
            text = str(draw.randrange(100, 10_000))
            question, answer, source = f"turn {text} =", text[::-1], DIGITS
        careless = draw.randrange(100) < options["careless_percent"]
        yield Entry(question, answer, slipped(answer) if careless else answer, slipped(answer), source)


GENERATOR = Generator(
    entries, {"family": 0, "careless_percent": 0}, {"family": Bound(0, 2), "careless_percent": Bound(0, 100)}
)
