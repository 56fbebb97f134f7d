"""The warning about responses that end at their limit."""

from __future__ import annotations

import pytest

from megarl.core.text import MANY, METRIC, TruncationWarning, truncation


def test_it_names_the_setting() -> None:
    text = truncation({METRIC: 0.88}, 64)
    assert text is not None
    assert text.startswith("88% of the responses were truncated at rollout.max_response_tokens=64")


@pytest.mark.parametrize("metrics", [{}, {METRIC: 0.0}, {METRIC: MANY - 0.01}])
def test_few_are_usual(metrics: dict[str, float]) -> None:
    assert truncation(metrics, 64) is None


def test_it_comes_once() -> None:
    warning = TruncationWarning(64)
    assert [warning.warning({METRIC: share}) is not None for share in (0.1, 0.9, 0.9)] == [False, True, False]
