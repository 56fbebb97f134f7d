"""The world of the other tests: what is raised where a rank does not return, and what its groups cost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.config.schema import ParallelConfig
from megarl.learn.parallel import process_groups
from tests.parallel.grid import run_grid


def sleep_on_one(rank: int) -> int:
    while rank == 1:
        time.sleep(0.1)
    return rank


def test_a_rank_that_hangs_shows_its_stack() -> None:
    with pytest.raises(AssertionError, match=r"no result of ranks \[1\] for 10 s") as error:
        run_grid(2, sleep_on_one, timeout_s=10)
    assert "in sleep_on_one" in str(error.value)


def threads_of_gloo(rank: int) -> tuple[int, float]:
    """Threads that receive for process groups, and the sum of the ranks over a group that was made last."""
    process_groups.initialize(ParallelConfig(tp=2), seed=1)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop"), total.item()


def test_the_groups_of_a_rank_share_a_device() -> None:
    """torch gives each group a thread that wakes up a hundred times a second, and a listening port."""
    assert run_grid(2, threads_of_gloo) == [(1, 3.0), (1, 3.0)]
