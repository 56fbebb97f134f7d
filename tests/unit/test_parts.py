"""Computed part by part, everything about a step has the bits that it has when it is computed at once."""

from __future__ import annotations

import pytest
import torch

from megarl.learn.algorithms.terms import kl, parts
from megarl.learn.algorithms.terms.token_rewards import VARIANCE_EPSILON, whitened
from megarl.learn.algorithms.terms.value import explained_variance
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
    assert mismatch(step, sampled) == {
        "training/rollout_logp_diff_mean": float(difference.double().mean()),
        "training/rollout_probs_diff_mean": float(probability.double().mean()),
        "training/rollout_logp_diff_p99": float(difference.double().quantile(0.99, interpolation="higher")),
        "training/rollout_logp_diff_max": float(difference.max()),
        "training/rollout_probs_diff_max": float(probability.max()),
    }


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_a_step(step: Sequences, estimator: str) -> None:
    assert step.old_logp is not None and step.ref_logp is not None
    at_once = kl.estimates(step.old_logp[step.mask], step.ref_logp[step.mask], estimator)
    assert kl.mean(step.old_logp, step.ref_logp, step.mask, estimator) == float(at_once.mean())


def test_what_critics_and_advantages_take(step: Sequences) -> None:
    assert step.values is not None and step.returns is not None
    v, r = step.values[step.mask].double(), step.returns[step.mask].double()
    assert explained_variance(step.values, step.returns, step.mask) == 1.0 - float((r - v).var() / r.var())
    kept = parts.picked(step.returns, step.mask)
    assert torch.equal(kept, step.returns[step.mask])
    before = kept.clone()
    x = kept.double()
    assert torch.equal(whitened(kept), ((x - x.mean()) / (x.var() + VARIANCE_EPSILON).sqrt()).float()) and torch.equal(
        kept, before
    )
    assert torch.equal(parts.spread_out(kept, step.mask), torch.where(step.mask, step.returns, 0.0))


def test_what_goes_by_sequences(step: Sequences) -> None:
    assert step.old_logp is not None
    numbers = torch.tensor([0.5, -0.0, 3.0, 1e-30, 7.0], dtype=torch.float64)
    assert torch.equal(parts.repeated(numbers, LENGTHS), numbers[step.row])
    assert (
        parts.counts(step.mask, LENGTHS).tolist()
        == torch.zeros(5, dtype=torch.int64).index_add(0, step.row, step.mask.long()).tolist()
    )
    values = step.old_logp.double()
    assert torch.equal(parts.sums(values, LENGTHS), torch.zeros(5, dtype=torch.float64).index_add(0, step.row, values))
    empty = torch.tensor([0, TOTAL, 0])
    assert parts.sums(values, empty).tolist() == [
        0.0,
        float(torch.zeros(1, dtype=torch.float64).index_add(0, step.row * 0, values)),
        0.0,
    ]
