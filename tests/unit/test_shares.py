"""A rank that holds some sequences of a step computes the bits of one that holds them all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.learn import algorithms
from megarl.learn.algorithms.terms.reduction import Tokens
from megarl.train.update.learner import step_input
from tests.conftest import SOAK
from tests.shares import LENGTHS, held, results, share_of, whole

WAYS = ((2, True), (3, False), (4, True)) if not SOAK else tuple((n, way) for n in (2, 3, 4) for way in (False, True))
"""Ranks, and whether a sequence may lie on several."""
NAMES = sorted(name for name, algorithm in algorithms.ALGORITHMS.items() if "advantages" in algorithm.needs)


class Ranks:
    """Simulated ranks, a thread each, that hold these sequences of a step."""

    def __init__(self, shares: list[list[int]]) -> None:
        self.shares = shares
        self._given: list[torch.Tensor] = [torch.empty(0)] * len(shares)
        self._barrier = threading.Barrier(len(shares), timeout=60)

    def together(self, rank: int, partial: torch.Tensor) -> torch.Tensor:
        """``Together`` of ``rank``. A sequence's partial result must be the same on all that hold it."""
        self._given[rank] = partial
        self._barrier.wait()
        rows: dict[int, torch.Tensor] = {}
        for share, given in zip(self.shares, self._given, strict=True):
            assert len(share) == len(given)
            for number, row in zip(share, given, strict=True):
                assert rows.setdefault(number, row).numpy().tobytes() == row.numpy().tobytes()
        self._barrier.wait()
        return torch.stack([rows[number] for number in range(len(LENGTHS))])


def dealt(ranks: int, seed: int, *, overlap: bool) -> list[list[int]]:
    """Sequences of each rank, ascending; the last of four ranks has none."""
    draw = random.Random(seed)
    shares: list[set[int]] = [set() for _ in range(ranks)]
    for number in range(len(LENGTHS)):
        for _ in range(2 if overlap and draw.random() < 0.4 else 1):
            shares[draw.randrange(min(ranks, 3))].add(number)
    return [sorted(share) for share in shares]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_and_metric_has_the_bits_of_the_whole_step(name: str) -> None:
    bits, wanted = results(name, whole(name))
    assert len(wanted) > 15 and wanted[-1].startswith("the engine's log-probs of ")
    for ranks, overlap in WAYS:
        shares = dealt(ranks, ranks, overlap=overlap)
        world = Ranks(shares)

        def work(rank: int, world: Ranks = world) -> tuple[dict[int, bytes], list[str]]:
            part = held(whole(name), share_of(world.shares[rank], lambda partial: world.together(rank, partial)))
            return results(name, part)

        with ThreadPoolExecutor(ranks) as pool:
            found = list(pool.map(work, range(ranks)))
        for share, (own, told) in zip(shares, found, strict=True):
            assert own == {number: bits[number] for number in share}
            assert told == wanted


def test_shares_are_taken_in_many_ways() -> None:
    """Or the test above would say little."""
    drawn = {way: dealt(way[0], way[0], overlap=way[1]) for way in WAYS}
    assert all(set().union(*shares) == set(range(len(LENGTHS))) for shares in drawn.values())
    shared = {way: sum(len({*a} & {*b}) for a in shares for b in shares if a is not b) for way, shares in drawn.items()}
    assert all((number > 0) is overlap for (_, overlap), number in shared.items())


def test_a_quantile_is_the_order_statistic() -> None:
    """Of numbers in which many are one, of few numbers, of infinities and NaN."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([5, 1, 300, 70_000, 40])
    for scale in (0.0, 1e-40, 1.0, 1e30):
        x = torch.randn(int(lengths.sum()), generator=generator).mul(scale).abs()
        x[::3] = x[0]
        for keep in (1e-4, 0.01, 1.0):
            mask = torch.rand(len(x), generator=generator) < keep
            mask[0] = True
            kept = Tokens(mask, lengths)
            for at in (0.0, 0.5, 0.99, 1.0):
                assert kept.quantile(at, torch.clone, x) == float(x[mask].double().quantile(at, interpolation="higher"))
    odd = torch.tensor([float("inf"), 1.0, float("nan"), -0.0, 0.0])
    every = Tokens(torch.ones(5, dtype=torch.bool), torch.tensor([2, 0, 3]))
    assert [every.quantile(at, torch.clone, odd) for at in (0.0, 0.5, 0.75)] == [0.0, 1.0, float("inf")]
    assert str(every.quantile(1.0, torch.clone, odd)) == "nan"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [torch.exp, torch.expm1])
def test_elementwise_functions_do_not_depend_on_the_place(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """The partial results of a sequence rest on it: others may stand before and behind."""
    x = torch.randn(20_011, generator=torch.Generator().manual_seed(1)).to(dtype)
    at_once = function(x)
    for length in (1, 2, 3, 5, 7, 8, 15, 17, 31, 33, 100, 1000, 5000):
        for start in range(70):
            assert torch.equal(function(x[start : start + length].clone()), at_once[start : start + length])


def test_an_estimate_of_ones_own_is_given_the_whole_step() -> None:
    ppo = algorithms.get("ppo")
    assert not ppo.whole_step and replace(ppo, shares=False).whole_step and not algorithms.get("grpo").whole_step
    share = share_of([0, 1], lambda partial: torch.cat([partial, partial.new_zeros(len(LENGTHS) - 2)]))
    batch = held(whole("ppo"), share)
    step = step_input(batch, ppo, AlgorithmConfig())
    with pytest.raises(AssertionError, match="must be given the whole step"):
        replace(ppo, shares=False).step_advantages(step, AlgorithmConfig())
