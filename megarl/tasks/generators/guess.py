"""Guessing games for the environment ``guess``."""

from __future__ import annotations

import random
from collections.abc import Mapping

from megarl.core.errors import ConfigError
from megarl.tasks.generators.entries import Entries, Entry

GAMES = 10_000
OPTIONS = {"max_number": 9, "numbers": 7, "tries": 3}
"""Options and their defaults: the largest number, how many numbers a question names, the most guesses."""


def guess(seed: int, settings: Mapping[str, int]) -> Entries:
    """Ranges with a hidden number: ``Game 7. Guess 2 to 8: higher or lower?`` A teacher guesses any of the numbers.

    Raises ConfigError where fewer than two numbers are named, or more than there are.
    """
    most, numbers, tries = settings["max_number"], settings["numbers"], settings["tries"]
    if not 2 <= numbers <= most + 1 or tries < 1:
        raise ConfigError(
            f"taskset.options: guess takes 2 to max_number + 1 numbers and at least 1 of tries, got {dict(settings)}"
        )
    dice = random.Random(seed)
    while True:
        low = dice.randint(0, most + 1 - numbers)
        high = low + numbers - 1
        question = f"Game {dice.randrange(GAMES)}. Guess {low} to {high}: higher or lower?"
        first, second = dice.sample(range(low, high + 1), 2)
        hidden = random.Random(question).randint(low, high)
        yield Entry(question, str(hidden), str(first), str(second), "guess", "game", {"tries": tries})
