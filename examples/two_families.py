"""Rows of two kinds of tasks: sums of two numbers (``add``), and a number's digits backwards (``turn``).

The tokenizer of a model from scratch knows only the words of its rows. Questions of both kinds have the same words, so
models trained on either kind have the same tokens, as distillation needs.

The option ``family`` is 0 for both in turn, 1 for sums alone, 2 for digits alone. Used by `experiment=family` and
`experiment=distill_two` (docs/distillation.md).
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from megarl.tasks.generators.entries import Entries, Entry, Generator, slipped

SUMS, DIGITS = "sums", "digits"


def entries(seed: int, options: Mapping[str, int]) -> Entries:
    """Yield entries without end; the same seed yields the same."""
    draw = random.Random(seed)
    number = 0
    while True:
        number += 1
        if (options["family"] or 1 + number % 2) == 1:
            a, b = draw.randrange(100), draw.randrange(100)
            question, answer, source = f"add not turn {a} {b} =", str(a + b), SUMS
        else:
            text = str(draw.randrange(100, 10_000))
            question, answer, source = f"turn not add {text} =", text[::-1], DIGITS
        yield Entry(question, answer, answer, slipped(answer), source)


GENERATOR = Generator(entries, {"family": 0, "slip_percent": 0})
