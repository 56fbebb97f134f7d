"""Examples of the grammar of final answers, and the steps that a verdict records."""

from __future__ import annotations

import pytest

from megarl.rewards import compute_score
from megarl.rewards.answer import trace
from megarl.rewards.answer.grammar import FORMS, extract
from megarl.rewards.school.final import LETTER_FORMS
from megarl.rewards.school.verifier import score as score_school

ANIMALS = {"options": {"A": "cat", "B": "dog", "C": "bird", "D": "fish"}}


@pytest.mark.parametrize(
    ("form", "response", "answer"), [(form, *example) for form, examples in FORMS.items() for example in examples]
)
def test_examples_of_forms(form: str, response: str, answer: str) -> None:
    with trace.recorded() as steps:
        assert extract(response) == answer
    assert steps[-1].kind == "read" and steps[-1].rule == form


@pytest.mark.parametrize(
    ("form", "response", "letters"),
    [(form, *example) for form, examples in LETTER_FORMS.items() for example in examples],
)
def test_examples_of_letters(form: str, response: str, letters: str) -> None:
    gold = letters or "B"
    with trace.recorded() as steps:
        status = score_school(response, gold, ANIMALS)["status"]
    assert status == ("ok" if letters else "wrong")
    assert not letters or form in [step.rule for step in steps if step.kind == "read"]


@pytest.mark.parametrize(
    ("source", "response", "gold", "rule"),
    [
        ("math", r"\boxed{5}", "5", "same text"),
        ("math", r"\boxed{5.0}", "5", "numbers with units"),
        ("math", r"\boxed{1+x}", "x+1", "expressions"),
        ("math", r"\boxed{y=2x}", "y=3x", "equation"),
        ("math", r"\boxed{(1,2)}", "(1,3)", "tuple and tuple"),
        ("math", "Answer: 5?", "5", "a question"),
        ("math", "Answer: 5%", "5", "per cent, which the question does not ask for"),
        ("k12", r"\boxed{B}", "B", "letters"),
        ("k12", r"\boxed{H_2O}", "H2O", "chemical formula"),
        ("k12", r"\boxed{true}", True, "judgement"),
        ("vision/count", "There are 5 dogs.", "5", "count"),
    ],
)
def test_a_verdict_records_what_decided(source: str, response: str, gold: object, rule: str) -> None:
    with trace.recorded() as steps:
        compute_score(source, response, gold)
    assert rule in [step.rule for step in steps if step.kind == "compared"], steps


def test_steps_are_bounded() -> None:
    with trace.recorded() as steps:
        for _ in range(1000):
            trace.read("box", "5" * 100_000)
    assert len(steps) == trace.MAX_STEPS and all(len(step.text) <= 2 * trace.MAX_TEXT for step in steps)
    trace.read("box", "5")
    assert len(steps) == trace.MAX_STEPS
