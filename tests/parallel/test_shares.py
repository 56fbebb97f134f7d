"""Ranks of a gloo world that hold shares of a step: advantages and metrics have the bits of the whole step."""

from __future__ import annotations

import pytest
import torch

from megarl.learn.batching import StepShare
from tests.parallel.grid import run_grid
from tests.shares import LENGTHS, held, results, whole

SHARES = ([0, 3, 4, 8], [1, 3, 5], [2, 4, 6, 7])
"""Sequences of each rank; two of them are held twice."""


def on_rank(rank: int, name: str) -> tuple[dict[int, bytes], list[str]]:
    """Runs in each rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=len(SHARES))

    return results(name, held(whole(name), StepShare.of(SHARES[rank], torch.tensor(LENGTHS))))


@pytest.mark.parametrize("name", ["ppo", "mix"])
def test_ranks_with_shares_compute_the_bits_of_the_whole_step(name: str) -> None:
    bits, wanted = results(name, whole(name))
    for share, (own, told) in zip(SHARES, run_grid(len(SHARES), on_rank, name), strict=True):
        assert own == {number: bits[number] for number in share} and told == wanted
