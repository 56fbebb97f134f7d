"""Packed GAE against the plain loop, a matrix form, and closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import ops


def packed(seed: int, lengths: list[int]):
    g = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    n = int(cu[-1])
    return torch.randn(n, generator=g), torch.randn(n, generator=g), cu, torch.randn(len(lengths), generator=g)


def by_matrix(rewards, values, bootstrap, gamma, lam):
    """A = Σ_k (γλ)^k δ_{t+k} as an upper-triangular matrix, one sequence, float64."""
    n = len(rewards)
    delta = rewards.double() + gamma * torch.cat([values[1:], bootstrap[None]]).double() - values.double()
    power = (torch.arange(n)[None] - torch.arange(n)[:, None]).double()
    weights = torch.where(power >= 0, (gamma * lam) ** power.clamp(min=0), 0.0)
    return weights @ delta


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_against_matrix_and_loop(seed, lengths, gamma, lam, index):
    rewards, values, cu, bootstrap = packed(seed, lengths)
    advantages, returns = ops.gae(rewards, values, cu.to(index), gamma=gamma, lam=lam, bootstrap=bootstrap)
    reference = ops.gae_reference(rewards.double(), values.double(), cu, gamma=gamma, lam=lam, bootstrap=bootstrap.double())
    for i, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        want = by_matrix(rewards[a:b], values[a:b], bootstrap[i], gamma, lam)
        assert torch.allclose(advantages[a:b].double(), want, rtol=2e-6, atol=2e-6)
        assert torch.allclose(reference[0][a:b], want, rtol=1e-12, atol=1e-12)
    assert torch.allclose(returns.double(), reference[1], rtol=2e-6, atol=2e-6)


def test_closed_form():
    """γ=0.5, λ=0.5: δ = (1 + 0.5·3 − 2, 2 + 0.5·4 − 3) = (0.5, 1); A = (0.5 + 0.25·1, 1)."""
    advantages, returns = ops.gae(
        torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]), torch.tensor([0, 2]), gamma=0.5, lam=0.5, bootstrap=torch.tensor([4.0])
    )
    assert advantages.tolist() == [0.75, 1.0] and returns.tolist() == [2.75, 4.0]


def test_threads_and_neighbours_change_no_bits():
    rewards, values, cu, bootstrap = packed(1, [5000] * 40)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(ops.gae(rewards, values, cu, gamma=0.99, lam=0.95, bootstrap=bootstrap)[0])
    torch.set_num_threads(before)
    alone = ops.gae(rewards[5000:10000], values[5000:10000], torch.tensor([0, 5000]), gamma=0.99, lam=0.95, bootstrap=bootstrap[1:2])[0]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0][5000:10000], alone)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rewards": torch.zeros(4, dtype=torch.float64)}, TypeError, "rewards must be float32, got float64"),
        ({"values": torch.zeros(3)}, ValueError, r"values must have shape \[4\], got \[3\]"),
        ({"cu_seqlens": torch.tensor([0, 1, 3])}, ValueError, "cu_seqlens must rise from 0 to the number of tokens 4"),
        ({"cu_seqlens": torch.tensor([0, 3, 1, 4]), "bootstrap": torch.zeros(3)}, ValueError, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.empty(0, dtype=torch.int64)}, ValueError, "cu_seqlens must rise"),
        ({"bootstrap": torch.zeros(3)}, ValueError, r"bootstrap must have shape \[2\], got \[3\]"),
    ],
)
def test_errors_name_the_argument(change, error, text):
    arguments = {
        "rewards": torch.zeros(4), "values": torch.zeros(4), "cu_seqlens": torch.tensor([0, 1, 4]), "bootstrap": torch.zeros(2),
    } | change
    with pytest.raises(error, match=text):
        ops.gae(**arguments, gamma=1.0, lam=1.0)
