"""The world of the other tests: what is raised where a rank does not return."""

from __future__ import annotations

import time

import pytest

from tests.parallel.grid import run_grid


def sleep_on_one(rank: int) -> int:
    while rank == 1:
        time.sleep(0.1)
    return rank


def test_a_rank_that_hangs_shows_its_stack() -> None:
    with pytest.raises(AssertionError, match=r"no result of ranks \[1\] for 10 s") as error:
        run_grid(2, sleep_on_one, timeout_s=10)
    assert "in sleep_on_one" in str(error.value)
