"""Questions for megarl's own verifiers, and guessing games.

All are made of reasoning-gym's sums. What is asked about a sum, in which words and with which options, follows from the
sum itself: one that is held out is held out in every form.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence

from megarl.core.errors import ConfigError
from megarl.tasks.generators.entries import Entries, Entry, gym_entries, slipped

THINGS = ("pens", "books", "cards", "shells")
LETTERS = "ABCD"
NAMES = "abcde"
"""Arguments of a program, one for each term of the sum."""
TESTS = 4
"""Tests of a program. Two that differ in a coefficient rarely agree on one, as no argument is 0."""


def math(seed: int, settings: Mapping[str, int]) -> Entries:
    r"""Sums, decimal sums and equations, with the answer in a box: ``Solve x + 5 = 12. Answer in \boxed{}.``"""
    _check_terms("math", settings, 100)
    whole = gym_entries("chain_sum", seed, settings)
    # One digit on each side of the point, whatever the options say: as hard as sums of two digits.
    places = {"min_digits": 1, "max_digits": 1, "min_decimal_places": 1, "max_decimal_places": 1}
    decimal = gym_entries("decimal_chain_sum", seed, settings, **places)
    for found in itertools.chain.from_iterable(zip(whole, whole, decimal, strict=True)):
        if found is None:
            yield None
            continue
        expression, answer = found["metadata"]["expression"], found["answer"]
        first, rest = expression.split(" ", 1)
        if "." in expression or _dice(expression).random() < 0.5:
            task, shown = f"What is {expression}?", answer
        else:
            task, shown = f"Solve x {rest.translate(str.maketrans('+-', '-+'))} = {first}.", f"x={answer}"
        response = rf"\boxed{{{shown}}}"
        yield Entry(rf"{task} Answer in \boxed{{}}.", answer, response, slipped(response), "math/sums")


def k12(seed: int, settings: Mapping[str, int]) -> Entries:
    """Half of them with options (``What is 12 + 5? A. 27 B. 17 C. 18 D. 16.``), half with a short answer (``17
    pens``)."""
    _check_terms("k12", settings, 100)
    for found in gym_entries("chain_sum", seed, settings):
        if found is None:
            yield None
            continue
        expression, answer = found["metadata"]["expression"], found["answer"]
        dice = _dice(expression)
        story = _story(expression, dice.choice(THINGS))
        yield _choice(expression, answer, dice) if story is None or dice.random() < 0.5 else _short(story, answer)


def _choice(expression: str, answer: str, dice: random.Random) -> Entry:
    """The options are near the answer, each with another last digit: which one a number is, is then seen in a token.
    The careless teacher's number is one of them."""
    right, wrong = int(answer), slipped(answer)
    near = [str(right + by) for by in (-3, -2, -1, 1, 2, 3)]
    others = {
        number[-1]: number for number in dice.sample(near, len(near)) if number[-1] not in (answer[-1], wrong[-1])
    }
    options = dice.sample([answer, wrong, *list(others.values())[:2]], len(LETTERS))
    listed = " ".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))

    def written(option: str) -> str:
        return f"{option}. Answer: {LETTERS[options.index(option)]}"

    return Entry(
        f"What is {expression}? {listed}. Write Answer: and the letter.",
        LETTERS[options.index(answer)],
        written(answer),
        written(wrong),
        "k12/sums",
        info={"type": "choice", "options": options},
    )


def _short(story: tuple[str, str], answer: str) -> Entry:
    question, thing = story
    right = f"{answer} {thing}"
    return Entry(question, answer, right, slipped(right), "k12/sums", info={"type": "short", "options": []})


def _story(expression: str, thing: str) -> tuple[str, str] | None:
    """A question about things that come and go, and their name; None for one who would give more than there is."""
    first, *rest = expression.split()
    left, told = int(first), f"Ann has {first} {thing}."
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        left += int(sign + number)
        told += f" She gets {number}." if sign == "+" else f" She gives {number} away."
        if left < 0:
            return None
    return f"{told} How many {thing} has she now?", thing


def code(seed: int, settings: Mapping[str, int]) -> Entries:
    """Tasks to write a described function in Python: ``return 12 times a minus 5 times b``. Tested by calls or by
    assertions."""
    _check_terms("code", settings, len(NAMES))
    for found in gym_entries("chain_sum", seed, settings):
        if found is None:
            yield None
            continue
        expression = found["metadata"]["expression"]
        dice = _dice(expression)
        first, *rest = expression.split()
        coefficients = [int(first), *(int(sign + number) for sign, number in zip(rest[::2], rest[1::2], strict=True))]
        names = NAMES[: len(coefficients)]
        head = f"def f({', '.join(names)}):\n    return "
        terms = dict(zip(names, [first, *rest[1::2]], strict=True))
        said = _joined(
            [f"{number} times {name}" for name, number in terms.items()],
            ["plus" if sign == "+" else "minus" for sign in rest[::2]],
        )
        turned = dice.random() < 0.5  # either is right
        wrong = terms | {names[-1]: slipped(rest[-1])}
        right, wrong_too = (
            _joined([f"{n} * {v}" if turned else f"{v} * {n}" for n, v in t.items()], rest[::2]) for t in (terms, wrong)
        )
        yield Entry(
            f"{head}{said}\nWrite it in Python.",
            _tests(coefficients, dice),
            head + right,
            head + wrong_too,
            "code/sums",
            "code",
        )


def _joined(terms: Sequence[str], signs: Sequence[str]) -> str:
    return terms[0] + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))


def _tests(coefficients: Sequence[int], dice: random.Random) -> str:
    """JSON of calls and what they return (as APPS has them), or of assertions (as MBPP)."""
    inputs = [[dice.choice((-1, 1)) * dice.randint(1, 99) for _ in coefficients] for _ in range(TESTS)]
    outputs = [sum(c * value for c, value in zip(coefficients, given, strict=True)) for given in inputs]
    if dice.random() < 0.5:
        return json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": "f"})
    calls = [f"f({', '.join(map(str, given))})" for given in inputs]
    return json.dumps({"test_list": [f"assert {call} == {value}" for call, value in zip(calls, outputs, strict=True)]})


def _dice(expression: str) -> random.Random:
    """Return a generator seeded by the sum, the same in every process."""
    return random.Random(expression)


def _check_terms(name: str, settings: Mapping[str, int], most: int) -> None:
    if settings["min_terms"] < 2 or settings["max_terms"] > most:
        raise ConfigError(
            f"taskset.options: {name} takes sums of 2 to {most} terms, got {settings['min_terms']} to "
            f"{settings['max_terms']}"
        )


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
