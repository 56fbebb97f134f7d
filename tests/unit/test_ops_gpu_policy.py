"""Policy loss and GAE on a GPU: the numbers of float64, the same bits again, and in any company."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from megarl import ops
from tests.unit.test_ops_advantage import packed as packed_rewards
from tests.unit.test_ops_policy import assert_close, bits, evaluate, exact, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not ops.has_cuda_kernels(), reason="the extension was built without CUDA kernels (no nvcc)"),
]

VARIANTS = [
    {"importance": importance, "objective": objective, "kl": kl, "aggregation": aggregation}
    for importance, objective, kl, aggregation in itertools.product(
        ("token", "sequence_mean", "sequence_product"),
        ("ppo_clip", "cispo"),
        (None, "k1", "k2", "k3"),
        ("sum", "seq_mean"),
    )
]


def on_gpu(arguments):
    return {k: v.cuda() for k, v in arguments.items()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_policy(variant):
    arguments = packed(1, [300, 0, 1, 5000, 257], sigma=0.01 if variant["importance"] == "sequence_product" else 0.3)
    variant = variant | {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.1 if variant["kl"] else 0.0,
        "entropy_coef": 0.05,
    }
    variant["dual_clip"] = 3.0 if variant["objective"] == "ppo_clip" else None
    want = exact(arguments, **variant)
    arguments = on_gpu(arguments)
    got = evaluate(ops.policy_loss, arguments, **variant)
    on_cpu = lambda loss: type(loss)(loss.total.cpu(), type(loss.sums)(*(x.cpu() for x in loss.sums)))  # noqa: E731
    assert_close((on_cpu(got[0]), *(g.cpu() for g in got[1:])), want)
    again = evaluate(ops.policy_loss, arguments, **variant)
    assert all(torch.equal(a, b) for a, b in zip(bits(got), bits(again), strict=True))
    row = slice(301, 5301)
    alone = {k: v[row].clone() for k, v in arguments.items() if k != "cu_seqlens"} | {
        "cu_seqlens": torch.tensor([0, 5000]).cuda()
    }
    assert all(
        torch.equal(a, b)
        for a, b in zip(bits(got, row), bits(evaluate(ops.policy_loss, alone, **variant), slice(None)), strict=True)
    )


def test_policy_of_more_rows_than_a_grid_has_in_y():
    rows = 70_000
    arguments = packed(2, [2] * rows)
    want = exact(arguments, clip_low=0.2, clip_high=0.2)
    got = evaluate(ops.policy_loss, on_gpu(arguments), clip_low=0.2, clip_high=0.2)
    assert (got[1].cpu() - want[1]).abs().max() <= 2e-6 * want[1].abs().max()


@pytest.mark.parametrize("lengths", [[0], [1], [2047, 2048, 2049, 0, 31, 33], [100_000], [3, 70_000, 0, 5], [9] * 3000])
def test_gae(lengths):
    rewards, values, cu, bootstrap = packed_rewards(1, lengths)
    call = functools.partial(ops.gae, gamma=1.0, lam=0.99)
    want = ops.gae_reference(rewards.double(), values.double(), cu, gamma=1.0, lam=0.99, bootstrap=bootstrap.double())
    rewards, values, cu, bootstrap = (x.cuda() for x in (rewards, values, cu, bootstrap))
    got = call(rewards, values, cu, bootstrap=bootstrap)
    for x, exactly in zip(got, want, strict=True):
        assert ((x.cpu() - exactly).abs() <= 2e-6 * exactly.abs().clamp(min=1.0)).all()
    again = call(rewards, values, cu, bootstrap=bootstrap)
    # Among many sequences a block walks all tiles of a long one; among few, each tile has a block.
    company = call(
        rewards,
        values,
        torch.cat([cu, cu[-1:].expand(200)]),
        bootstrap=torch.cat([bootstrap, bootstrap.new_zeros(200)]),
    )
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, again, company, strict=True))


def test_compiled():
    rewards, values, cu, bootstrap = (x.cuda() for x in packed_rewards(4, [5, 0, 9]))
    call = functools.partial(ops.gae, gamma=0.9, lam=0.8)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = call(rewards, values, cu, bootstrap=bootstrap)
    assert all(
        torch.equal(a, b) for a, b in zip(eager, compiled(rewards, values, cu, bootstrap=bootstrap), strict=True)
    )
