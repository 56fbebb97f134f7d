"""Steps of a verdict, recorded on request: the form in which an answer was read, and the deciding comparison.

A verifier records steps with ``step``; outside ``recorded`` no step is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

MAX_STEPS = 200
"""Maximum recorded steps of one verdict."""
MAX_TEXT = 200
"""Maximum characters of the ground truth in a step; the whole text has at most twice as many."""


class Step(NamedTuple):
    """One step of a verdict.

    ``kind`` is ``asked`` (``text``: the requested kind of answer), ``read`` (``rule``: the form that gave ``text``) or
    ``compared`` (``rule``: the comparison).
    """

    kind: str
    rule: str
    text: str


_steps: list[Step] | None = None


def asked(text: str) -> None:
    """Record the kind of answer that a row asks for."""
    if _steps is not None:
        _record(Step("asked", "", text))


def read(form: str, text: str) -> str:
    """Record that ``form`` of the grammar gave ``text``, and return ``text``."""
    if _steps is not None:
        _record(Step("read", form, text))
    return text


def compared(rule: str, gold: str, pred: str, equal: bool) -> bool:
    """Record that ``rule`` decided whether two texts are equal, and return ``equal``."""
    if _steps is not None:
        _record(Step("compared", rule, f"{gold[:MAX_TEXT]} {'=' if equal else '≠'} {pred}"))
    return equal


def _record(step: Step) -> None:
    if _steps is not None and len(_steps) < MAX_STEPS:
        _steps.append(step._replace(text=step.text[: 2 * MAX_TEXT]))


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Record the steps of verdicts in the block, in this thread only."""
    global _steps
    steps: list[Step] = []
    _steps = steps
    try:
        yield steps
    finally:
        _steps = None
