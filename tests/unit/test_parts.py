"""Computed part by part or sequence by sequence, everything about a step is what it is when it is computed at once."""

from __future__ import annotations

import pytest
import torch

from megarl.learn.algorithms.terms import reduction, token_rewards
from megarl.learn.algorithms.terms.reduction import Tokens
from megarl.learn.algorithms.terms.token_rewards import VARIANCE_EPSILON, whitened
from megarl.learn.algorithms.token_returns import explained_variance
from megarl.learn.batching import Sequences
from megarl.train.update.gap import mismatch

LENGTHS = torch.tensor([300_001, 7, 1, 250_000, 40_003])
"""Several parts, none of which ends with a sequence."""
TOTAL = int(LENGTHS.sum())


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def step(request: pytest.FixtureRequest) -> Sequences:
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    generator = torch.Generator().manual_seed(3)
    old, noise, values = (torch.randn(TOTAL, generator=generator) for _ in range(3))
    old = -old.exp()
    return Sequences(
        torch.randint(0, 99, (TOTAL,), generator=generator, dtype=torch.int32),
        LENGTHS,
        torch.rand(TOTAL, generator=generator) < 0.7,
        old_logp=old,
        engine_logp=old + 0.01 * noise,
        ref_logp=old + 0.1 * noise,
        values=values,
        returns=values + noise,
        expert=torch.tensor([False, False, False, False, True]),
    )


def test_the_mismatch_of_log_probs(step: Sequences) -> None:
    assert step.old_logp is not None and step.engine_logp is not None and step.expert is not None
    sampled = step.mask & ~step.expert[step.row]
    old, engine = step.old_logp[sampled], step.engine_logp[sampled]
    difference, probability = (old - engine).abs(), (old.exp() - engine.exp()).abs()
    assert torch.equal(step.sampled, sampled)
    found = mismatch(step, Tokens(sampled, LENGTHS))
    assert found.pop("training/rollout_logp_diff_mean") == pytest.approx(float(difference.double().mean()), rel=1e-13)
    assert found.pop("training/rollout_probs_diff_mean") == pytest.approx(float(probability.double().mean()), rel=1e-13)
    assert found == {
        "training/rollout_logp_diff_p99": float(difference.double().quantile(0.99, interpolation="higher")),
        "training/rollout_logp_diff_max": float(difference.max()),
        "training/rollout_probs_diff_max": float(probability.max()),
    }


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_a_step(step: Sequences, estimator: str) -> None:
    assert step.old_logp is not None and step.ref_logp is not None
    at_once = token_rewards.estimates(step.old_logp[step.mask], step.ref_logp[step.mask], estimator)
    found = token_rewards.totals(step.old_logp, step.ref_logp, Tokens(step.mask, LENGTHS), estimator)
    assert found.number == len(at_once) and found.max == float(at_once.max()) and found.min == float(at_once.min())
    assert found.mean == pytest.approx(float(at_once.mean()), rel=1e-12)


def test_what_critics_and_advantages_take(step: Sequences) -> None:
    assert step.values is not None and step.returns is not None
    v, r = step.values[step.mask].double(), step.returns[step.mask].double()
    tokens = Tokens(step.mask, LENGTHS)
    explained = explained_variance(step.values, step.returns, tokens)
    assert explained == pytest.approx(1.0 - float((r - v).var() / r.var()), rel=1e-12)
    kept = reduction.picked(step.returns, step.mask)
    assert torch.equal(kept, step.returns[step.mask])
    before = kept.clone()
    x = kept.double()
    white = whitened(kept, Tokens(torch.ones(len(kept), dtype=torch.bool), reduction.counts(step.mask, LENGTHS)))
    exact = (x - x.mean()) / (x.var() + VARIANCE_EPSILON).sqrt()
    assert white.dtype == torch.float32 and torch.equal(kept, before)
    assert torch.allclose(white.double(), exact, rtol=2**-24, atol=1e-13)
    assert torch.equal(reduction.spread_out(kept, step.mask), torch.where(step.mask, step.returns, 0.0))


def test_reductions_do_not_depend_on_the_number_of_threads(step: Sequences) -> None:
    """Sums of torch do: a long sequence's is dealt to the threads."""
    assert step.old_logp is not None and step.ref_logp is not None
    threads, found = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(token_rewards.totals(step.old_logp, step.ref_logp, Tokens(step.mask, LENGTHS), "k3"))
    torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_what_goes_by_sequences(step: Sequences) -> None:
    assert step.old_logp is not None
    numbers = torch.tensor([0.5, -0.0, 3.0, 1e-30, 7.0], dtype=torch.float64)
    assert torch.equal(reduction.repeated(numbers, LENGTHS), numbers[step.row])
    assert (
        reduction.counts(step.mask, LENGTHS).tolist()
        == torch.zeros(5, dtype=torch.int64).index_add(0, step.row, step.mask.long()).tolist()
    )
    values = step.old_logp.double()
    assert torch.equal(
        reduction.sums(values, LENGTHS), torch.zeros(5, dtype=torch.float64).index_add(0, step.row, values)
    )
    empty = torch.tensor([0, TOTAL, 0])
    assert reduction.sums(values, empty).tolist() == [
        0.0,
        float(torch.zeros(1, dtype=torch.float64).index_add(0, step.row * 0, values)),
        0.0,
    ]
