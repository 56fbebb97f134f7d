"""The additive digest: equal to numpy, additive over boxes, and sensitive to every bit and every position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import _C, ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    return (torch.randn(shape, generator=g) * 20).abs().to(dtype)


def whole(x: torch.Tensor) -> int:
    return ops.slice_digest(x, start=(0,) * x.dim(), shape=x.shape)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 20),
    cols=st.integers(1, 40),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
)
def test_disjoint_boxes_add_up_to_the_whole(seed, rows, cols, cut, dtype, transposed):
    x = tensor(seed, (cols, rows), dtype).T if transposed else tensor(seed, (rows, cols), dtype)
    i, j = round(cut[0] * rows), round(cut[1] * cols)
    total = 0
    for a, b in ((0, i), (i, rows)):
        for c, d in ((0, j), (j, cols)):
            part = ops.slice_digest(x[a:b, c:d], start=(a, c), shape=(rows, cols))
            assert part == ops.slice_digest_reference(x[a:b, c:d], start=(a, c), shape=(rows, cols))
            total += part
    assert total % 2**64 == whole(x) == whole(x.contiguous())


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 100), dtype=st.sampled_from(DTYPES[:-1]), data=st.data())
def test_one_flipped_bit_changes_it(seed, n, dtype, data):
    x = tensor(seed, (n,), dtype)
    y = x.clone()
    words = y.view(INTEGER_OF_SIZE[x.element_size()])
    bit = data.draw(st.integers(0, 8 * x.element_size() - 2))
    words[data.draw(st.integers(0, n - 1))] ^= 1 << bit
    assert whole(x) != whole(y)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), i=st.integers(0, 49), j=st.integers(0, 49), dtype=st.sampled_from(DTYPES[:-1]))
def test_swapping_two_different_elements_changes_it(seed, i, j, dtype):
    x = tensor(seed, (50,), dtype)
    y = x.clone()
    y[i], y[j] = x[j], x[i]
    assert (whole(x) == whole(y)) == torch.equal(x, y)


def test_powers_of_two_do_not_cancel():
    """Float64 1.0 and 2.0 differ by one high bit: a linear checksum loses most swaps of the two."""
    x = torch.ones(64, dtype=torch.float64)
    digests = set()
    for i in range(64):
        y = x.clone()
        y[i] = 2.0
        digests.add(whole(y))
    assert len(digests) == 64


def test_sign_of_zero_position_and_dtype_matter():
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))
    x = torch.tensor([1.0])
    assert ops.slice_digest(x, start=(0,), shape=(9,)) != ops.slice_digest(x, start=(1,), shape=(9,))
    assert whole(torch.ones(8)) != whole(torch.ones(8, dtype=torch.bfloat16))


def test_golden():
    """splitmix64's finaliser of 0x9E3779B97F4A7C15 is its published first output for seed 0."""
    assert whole(torch.zeros(1, dtype=torch.int64)) == 0xE220A8397B1DCDAF


def test_threads_instruction_sets_and_higher_dimensions_change_nothing():
    x = tensor(2, (3, 700, 500), torch.bfloat16)
    threads, isa = torch.get_num_threads(), _C.isa()
    digests = set()
    for n in (1, 3):
        torch.set_num_threads(n)
        for name in ("generic", "avx2", "avx512"):
            if _C.use_isa(name):
                digests.add(whole(x))
    torch.set_num_threads(threads)
    _C.use_isa(isa)
    assert digests == {ops.slice_digest_reference(x, start=(0, 0, 0), shape=x.shape)}
    parts = [ops.slice_digest(x[i : i + 1, :, 100:], start=(i, 0, 100), shape=x.shape) for i in range(3)]
    assert sum(parts) % 2**64 == ops.slice_digest_reference(x[:, :, 100:], start=(0, 0, 100), shape=x.shape)


def test_flat_indices_beyond_32_bits():
    x = tensor(3, (2, 3), torch.float32)
    box = {"start": (70_000, 5), "shape": (100_000, 100_000)}
    assert ops.slice_digest(x, **box) == ops.slice_digest_reference(x, **box)


def test_scalar_and_empty():
    assert ops.slice_digest(torch.tensor(3.0), start=(), shape=()) == whole(torch.tensor([3.0]))
    assert ops.slice_digest(torch.empty(0, 5), start=(2, 0), shape=(4, 5)) == 0


@pytest.mark.parametrize(
    ("x", "start", "shape", "error", "text"),
    [
        (torch.zeros(3, 3), (2, 0), (4, 3), ValueError, r"a box of \(3, 3\) at start \(2, 0\) does not lie within shape \(4, 3\)"),
        (torch.zeros(3), (0, 0), (4, 3), ValueError, "x has 1 dimensions"),
        (torch.zeros(3, dtype=torch.complex64), (0,), (3,), TypeError, "not complex"),
        (torch.zeros(3, device="meta"), (0,), (3,), ValueError, "x is on meta"),
    ],
)
def test_errors_name_the_argument(x, start, shape, error, text):
    with pytest.raises(error, match=text):
        ops.slice_digest(x, start=start, shape=shape)
