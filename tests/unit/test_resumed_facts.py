"""Facts of a model before and after a resume."""

from __future__ import annotations

from typing import Any

from megarl.train.inference.resumed_facts import lost


def test_facts_that_are_others_after_a_resume_are_named() -> None:
    before: dict[str, Any] = {"weights": 2.0, "moments": 1.0, "average": 5.0, "reference": None, "random": "a"}
    assert lost(before, dict(before)) == {}
    assert set(lost(before, {**before, "moments": 0.0, "average": 4.0, "reference": 3.0})) == {
        "moments-lost",
        "average",
    }
