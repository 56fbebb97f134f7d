"""Packed GAE against the plain loop, a matrix form, and closed forms."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import _C, ops
from megarl.ops import advantage, native
from tests.conftest import examples
from tests.native import backends
from tests.native.backends import BACKENDS


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


@pytest.fixture(autouse=True)
def _same_isa():
    isa = _C.isa()
    yield
    _C.use_isa(isa)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(12, 50))
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(200, 300)), min_size=1, max_size=6),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_against_matrix_and_loop(backend, seed, lengths, gamma, lam, index):
    rewards, values, cu, bootstrap = packed(seed, lengths)
    with backends.on(backend):
        advantages, returns = ops.gae(rewards, values, cu.to(index), gamma=gamma, lam=lam, bootstrap=bootstrap)
        discounted = ops.discounted_returns(rewards, cu.to(index), gamma, bootstrap)
    reference = ops.gae_reference(
        rewards.double(), values.double(), cu, gamma=gamma, lam=lam, bootstrap=bootstrap.double()
    )
    for i, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        want = by_matrix(rewards[a:b], values[a:b], bootstrap[i], gamma, lam)
        assert torch.allclose(advantages[a:b].double(), want, rtol=2e-6, atol=2e-6)
        assert torch.allclose(reference[0][a:b], want, rtol=1e-12, atol=1e-12)
    assert torch.allclose(returns.double(), reference[1], rtol=2e-6, atol=2e-6)
    plain = ops.discounted_returns_reference(rewards.double(), cu, gamma, bootstrap.double())
    assert torch.allclose(discounted.double(), plain, rtol=2e-6, atol=2e-6)


def test_closed_form():
    """γ=0.5, λ=0.5: δ = (1 + 0.5·3 − 2, 2 + 0.5·4 − 3) = (0.5, 1); A = (0.5 + 0.25·1, 1)."""
    advantages, returns = ops.gae(
        torch.tensor([1.0, 2.0]),
        torch.tensor([2.0, 3.0]),
        torch.tensor([0, 2]),
        gamma=0.5,
        lam=0.5,
        bootstrap=torch.tensor([4.0]),
    )
    assert advantages.tolist() == [0.75, 1.0] and returns.tolist() == [2.75, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_join(backend):
    """Lengths around the tiles' sizes, γλ = 1 (where nothing fades) and less; many sequences, or one on its own."""
    lengths = [2047, 2048, 2049, 0, 1, 7, 8, 9, 31, 32, 33, 255, 256, 257, 4096, 9001]
    rewards, values, cu, bootstrap = packed(3, lengths)
    for gamma, lam in ((1.0, 1.0), (0.999, 0.99)):
        kw = {"gamma": gamma, "lam": lam}
        with backends.on(backend):
            got = ops.gae(rewards, values, cu, **kw, bootstrap=bootstrap)
        want = ops.gae_reference(rewards.double(), values.double(), cu, **kw, bootstrap=bootstrap.double())
        for x, exact in zip(got, want, strict=True):
            assert ((x - exact).abs() <= 2e-6 * exact.abs().clamp(min=1.0)).all()
        for i, (a, b) in enumerate(itertools.pairwise(cu.tolist())):
            # Alone, a long sequence is cut among blocks; among others it is one block's work.
            piece = rewards[a:b].clone(), values[a:b].clone(), torch.tensor([0, b - a])
            with backends.on(backend):
                alone = ops.gae(*piece, **kw, bootstrap=bootstrap[i : i + 1])
            assert all(torch.equal(x[a:b], y) for x, y in zip(got, alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_long_sequences(backend):
    """More tiles than a warp has lanes, and sequences beside them; the same bits as among many sequences."""
    lengths = [34 * 2048 + 5, 0, 3, 2 * 32768, 5 * 2048]
    rewards, values, cu, bootstrap = packed(5, lengths)
    many = torch.cat([cu, cu[-1:].expand(200)])
    with backends.on(backend):
        few = ops.gae(rewards, values, cu, gamma=1.0, lam=0.999, bootstrap=bootstrap)
        assert all(
            torch.equal(a, b)
            for a, b in zip(few, ops.gae(rewards, values, cu, gamma=1.0, lam=0.999, bootstrap=bootstrap), strict=True)
        )
        also = ops.gae(rewards, values, many, gamma=1.0, lam=0.999, bootstrap=torch.cat([bootstrap, torch.zeros(200)]))
    want = ops.gae_reference(rewards.double(), values.double(), cu, gamma=1.0, lam=0.999, bootstrap=bootstrap.double())
    for x, y, exact in zip(few, also, want, strict=True):
        assert torch.equal(x, y)
        assert ((x - exact).abs() <= 2e-6 * exact.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.99999), (0.999, 0.99)])
@pytest.mark.parametrize("padding", [0, 200])
def test_what_lies_behind_a_long_piece_counts(backend, gamma, lam, padding):
    """Sequences above the CPU's pieces of 32,768 tokens, where the first tokens see the last ones."""
    rewards, values, cu, bootstrap = packed(9, [100_000, 3, *[0] * padding])
    with backends.on(backend):
        ones = ops.gae(
            torch.ones(100_000), torch.zeros(100_000), cu[[0, 1]], gamma=1.0, lam=1.0, bootstrap=torch.zeros(1)
        )[0]
        got = ops.gae(rewards, values, cu, gamma=gamma, lam=lam, bootstrap=bootstrap)
    assert torch.equal(ones, torch.arange(100_000, 0, -1).float())
    want, behind, next_value = [0.0] * 100_000, 0.0, bootstrap[0].item()
    r, v = rewards.tolist(), values.tolist()
    for t in reversed(range(100_000)):
        want[t] = behind = r[t] + gamma * next_value - v[t] + gamma * lam * behind
        next_value = v[t]
    exact = torch.tensor(want, dtype=torch.float64)
    for x, y in zip(got, (exact, exact + values[:100_000].double()), strict=True):
        assert ((x[:100_000] - y).abs() <= 2e-6 * y.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.9), (0.1, 0.001), (1.0, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_however_far_in_front(backend, gamma, lam, bad):
    """A power of γλ that underflows would turn infinity into NaN; with γλ = 0 the plain formula does so itself."""
    rewards, values, cu, bootstrap = packed(10, [70_000])
    rewards[69_000] = bad
    for empty in (0, 200):
        cut = torch.cat([cu, cu[-1:].expand(empty)])
        with backends.on(backend):
            advantages, returns = ops.gae(
                rewards, values, cut, gamma=gamma, lam=lam, bootstrap=torch.cat([bootstrap, torch.zeros(empty)])
            )
        front = torch.full((69_000,), bad if gamma else torch.nan)
        for x in (advantages, returns):
            assert torch.equal(x[:69_000].nan_to_num(7.0), front.nan_to_num(7.0)) and x[69_001:].isfinite().all()
            assert x[69_000].isnan() if bad != bad else x[69_000] == bad  # noqa: PLR0124


def test_nan_reaches_what_lies_in_front_of_it_only():
    rewards, values, cu, bootstrap = packed(6, [50, 60, 40])
    rewards[80] = torch.nan
    for backend in BACKENDS:
        with backends.on(backend):
            advantages, _ = ops.gae(rewards, values, cu, gamma=0.9, lam=0.9, bootstrap=bootstrap)
        assert advantages.isnan().nonzero()[:, 0].tolist() == list(range(50, 81))


def test_instruction_sets_threads_and_neighbours_change_no_bits():
    rewards, values, cu, bootstrap = packed(1, [5000] * 40)
    results = []
    before = torch.get_num_threads()
    for isa in ("generic", "avx2", "avx512"):
        for threads in (1, 3):
            if _C.use_isa(isa):
                torch.set_num_threads(threads)
                results.append(ops.gae(rewards, values, cu, gamma=0.99, lam=0.95, bootstrap=bootstrap)[0])
    torch.set_num_threads(before)
    alone = ops.gae(
        rewards[5000:10000], values[5000:10000], torch.tensor([0, 5000]), gamma=0.99, lam=0.95, bootstrap=bootstrap[1:2]
    )[0]
    assert all(torch.equal(results[0], other) for other in results[1:]) and torch.equal(results[0][5000:10000], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_lie_are_clamped(backend):
    """What is not looked at on a GPU must do no harm there."""
    rewards, values, _, bootstrap = packed(2, [30, 20])
    scratch = torch.empty(_C.gae_slots(2, 50), dtype=torch.float64)
    for address in (0, scratch.data_ptr()):
        for lie in ([-5, 7, 2**40], [2**50, -(2**50), 3], [60, 70, 80], [40, 10, 50]):
            cu, a, r = torch.tensor(lie), torch.zeros(50), torch.zeros(50)
            with backends.on(backend):
                native.run(
                    "gae",
                    rewards,
                    rewards.data_ptr(),
                    values.data_ptr(),
                    cu.data_ptr(),
                    2,
                    50,
                    bootstrap.data_ptr(),
                    0.9,
                    0.9,
                    a.data_ptr(),
                    r.data_ptr(),
                    address,
                )


def test_empty():
    nothing = torch.empty(0)
    for backend in BACKENDS:
        with backends.on(backend):
            for n in (0, 3):
                cu = torch.zeros(n + 1, dtype=torch.int64)
                assert [
                    x.shape for x in ops.gae(nothing, nothing, cu, gamma=1.0, lam=1.0, bootstrap=torch.zeros(n))
                ] == [(0,), (0,)]


def test_as_torch_sees_it():
    rewards, values, cu, bootstrap = packed(4, [5, 0, 9])
    torch.library.opcheck(advantage.packed_gae, (rewards, values, cu, bootstrap, 0.9, 0.8))
    call = functools.partial(ops.gae, gamma=0.9, lam=0.8)
    eager = call(rewards, values, cu, bootstrap=bootstrap)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(rewards, values, cu, bootstrap=bootstrap)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    meta = call(rewards.to("meta"), values.to("meta"), cu.to("meta"), bootstrap=bootstrap.to("meta"))
    assert all(x.is_meta and x.shape == (14,) and x.dtype == torch.float32 for x in meta)
    twin = ops.gae_reference(rewards, values, cu, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    ops.use("torch")
    try:
        assert all(torch.equal(a, b) for a, b in zip(call(rewards, values, cu, bootstrap=bootstrap), twin, strict=True))
    finally:
        ops.use("megarl")


FAULTS = [
    ({"rewards": torch.zeros(4, dtype=torch.int32)}, TypeError, "rewards must be float32"),
    ({"rewards": torch.zeros(2, 2)}, ValueError, r"rewards must have shape \[any\], got \[2, 2\]"),
    ({"values": torch.zeros(3)}, ValueError, r"values must have shape \[4\], got \[3\]"),
    ({"values": torch.zeros(4).double()}, TypeError, "values must be float32, got float64"),
    ({"cu_seqlens": torch.tensor([0, 1, 3])}, ValueError, "cu_seqlens must rise from 0 to the number of tokens 4"),
    ({"cu_seqlens": torch.tensor([1, 2, 4])}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([0, 3, 1, 4]), "bootstrap": torch.zeros(3)}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([0, 3, 1, 4]).int(), "bootstrap": torch.zeros(3)}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([0.0, 1.0, 4.0]).double()}, TypeError, "cu_seqlens must be int32 or int64"),
    ({"cu_seqlens": torch.empty(0, dtype=torch.int64)}, ValueError, "cu_seqlens must rise"),
    ({"bootstrap": torch.zeros(3)}, ValueError, r"bootstrap must have shape \[2\], got \[3\]"),
    ({"gamma": math.nan}, ValueError, "gamma must be finite, got nan"),
    ({"gamma": 1.01}, ValueError, r"gamma must be in \[0, 1\], got 1.01"),
    ({"lam": -0.1}, ValueError, r"lam must be in \[0, 1\], got -0.1"),
    ({"lam": math.inf}, ValueError, "lam must be finite"),
]
PLAIN_FAULTS = [
    ({"rewards": torch.zeros(4, dtype=torch.float64)}, TypeError, "rewards must be float32, got float64"),
    ({"rewards": [0.0] * 4}, TypeError, "rewards must be a torch.Tensor, got list"),
    ({"bootstrap": 0.0}, TypeError, "bootstrap must be a torch.Tensor, got float"),
    ({"gamma": "1"}, TypeError, "gamma must be a number, got str"),
    ({"lam": None}, TypeError, "lam must be a number, got NoneType"),
    ({"lam": True}, TypeError, "lam must be a number, got bool"),
]


def with_fault(change):
    return {
        "rewards": torch.zeros(4),
        "values": torch.zeros(4),
        "cu_seqlens": torch.tensor([0, 1, 4]),
        "bootstrap": torch.zeros(2),
        "gamma": 1.0,
        "lam": 1.0,
    } | change


@pytest.mark.parametrize(("change", "error", "text"), FAULTS + PLAIN_FAULTS)
def test_errors_name_the_argument(change, error, text):
    with pytest.raises(error, match=text):
        ops.gae(**with_fault(change))


@pytest.mark.parametrize(("change", "error", "text"), FAULTS)
def test_the_registered_op_and_the_twin_check_too(change, error, text):
    arguments = with_fault(change)
    with pytest.raises(error, match=text):
        torch.ops.megarl.gae(*(arguments[k] for k in ("rewards", "values", "cu_seqlens", "bootstrap", "gamma", "lam")))
    with pytest.raises(error, match=text):
        ops.gae_reference(**arguments)
    ops.use("torch")
    try:
        with pytest.raises(error, match=text):
            ops.gae(**arguments)
    finally:
        ops.use("megarl")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [fault for fault in FAULTS + PLAIN_FAULTS[1:4] if not fault[0].keys() & {"lam", "values"}],
)
@pytest.mark.parametrize("function", [ops.discounted_returns, ops.discounted_returns_reference])
def test_discounted_returns_check_too(function, change, error, text):
    arguments = with_fault(change)
    with pytest.raises(error, match=text):
        function(*(arguments[k] for k in ("rewards", "cu_seqlens", "gamma", "bootstrap")))
