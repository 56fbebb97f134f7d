"""Lines that a job prints for people: few of a short run, some of a long one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megarl.core.metrics import PrintedSteps


def printed(steps: int, seconds: float = 0.01, first: int = 1) -> list[int]:
    """Return the steps with a line of a run whose steps take ``seconds``, begun at step ``first``."""
    clock = iter(range(steps + 1))
    chosen = PrintedSteps(steps, lambda: seconds * next(clock))
    return [step for step in range(first, steps + 1) if chosen.is_due(step)]


@pytest.mark.parametrize("steps", [1, 7, 20, 21, 150, 333, 1000])
def test_a_short_run_has_about_twenty_lines(steps: int) -> None:
    lines = printed(steps)
    assert lines[0] == 1 and lines[-1] == steps and min(steps, 8) <= len(lines) <= 22


def test_a_long_run_has_a_line_every_hundred_steps() -> None:
    lines = printed(5000)
    assert lines[0] == 1 and max(later - earlier for earlier, later in pairwise(lines)) == 100


def test_slow_steps_have_a_line_a_minute_and_a_resume_one_at_once() -> None:
    assert printed(300, seconds=61) == list(range(1, 301))
    assert printed(150, first=73)[:2] == [73, 80]
