"""The additive digest: equal to numpy, additive over boxes, and sensitive to every bit and every position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import _C, ops
from tests.native import backends, kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = (0x17FB89EE35ED72B1, 0x48BB8C42874E1F25)


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    return (torch.randn(shape, generator=g) * 20).abs().to(dtype)


def whole(x: torch.Tensor) -> int:
    return ops.slice_digest(x, start=(0,) * x.dim(), shape=x.shape)


@settings(max_examples=60)
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


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), dims=st.integers(1, 8), dtype=st.sampled_from(DTYPES[:-1]))
def test_any_box_equals_the_reference(seed, dims, dtype):
    """Permuted, sliced, expanded boxes, at flat indices up to 2**40."""
    x, start, shape = kernels.a_box(seed, dims, dtype)
    kernels.digest_equals_reference(x, start, shape, "cpu")


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 300), max_size=6), dtype=st.sampled_from(DTYPES))
def test_cuts_within_a_block_of_eight_bytes_add_up(seed, cuts, dtype):
    x = tensor(seed, (300,), dtype)
    edges = sorted({0, 300, *cuts})
    parts = [ops.slice_digest(x[a:b], start=(a,), shape=(300,)) for a, b in zip(edges, edges[1:], strict=False)]
    assert sum(parts) % 2**64 == whole(x)


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_every_flipped_bit_changes_it(dtype):
    x = tensor(5, (24 // dtype.itemsize,), dtype)
    digests = {whole(x)}
    for i in range(x.numel()):
        for bit in range(8 * dtype.itemsize):
            y = x.clone()
            y.view(INTEGER_OF_SIZE[dtype.itemsize])[i] ^= (
                -(1 << bit) if bit == 8 * dtype.itemsize - 1 and dtype.itemsize > 1 else 1 << bit
            )
            digests.add(whole(y))
    assert len(digests) == 1 + 8 * 24


@settings(max_examples=60)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_structured_changes_all_give_different_digests(dtype):
    """Swapped and shifted rows and columns, flipped signs, equal steps at different places."""
    x = tensor(6, (32, 32), dtype)
    one = torch.ones(32, 32, dtype=dtype)
    variants = [x, x.flip(0), x.flip(1), one]
    variants += [x.roll(shift, d) for shift in range(1, 32) for d in (0, 1)]
    for i in range(32):
        for j in range(32):
            changed = one.clone()
            changed[i, j] = 2
            variants.append(changed)
            changed = x.clone()
            changed[i, j] *= -1
            variants.append(changed)
            if i < j:
                for d in (0, 1):
                    order = list(range(32))
                    order[i], order[j] = j, i
                    variants.append(x.index_select(d, torch.tensor(order)))
                changed = one.clone()
                changed[i, i], changed[i, j] = 0.5, 2
                variants.append(changed)
    different = {v.view(INTEGER_OF_SIZE[dtype.itemsize]).numpy().tobytes() for v in variants}
    assert len({whole(v) for v in variants}) == len(different) > 3000


def test_golden():
    """Written down in checkpoints' manifests: these must never change."""
    assert whole(torch.zeros(1, dtype=torch.int64)) == GOLDEN[0]
    assert whole(torch.arange(1000, dtype=torch.float32).to(torch.bfloat16)) == GOLDEN[1]
    block, key = 0x0004_0003_0002_0001, 0x9E3779B97F4A7C15  # one block by hand: four elements of 16 bits
    key = (key ^ key >> 32) * 0xD6E8FEB86659FD93 % 2**64
    key = (key ^ key >> 29) | 1
    assert whole(torch.tensor([1, 2, 3, 4], dtype=torch.int16)) == (block + (block >> 32) + 4) * key % 2**64


def test_the_op_is_registered_and_compiles():
    x, y = torch.randn(5, 7), torch.randn(3).bfloat16()
    arguments = [x, y], [1, 0, 2], [9, 7, 5]
    torch.library.opcheck(torch.ops.megarl.slice_digests, arguments, raise_exception=True)
    got = torch.ops.megarl.slice_digests(*arguments)
    want = [ops.slice_digest(x, start=(1, 0), shape=(9, 7)), ops.slice_digest(y, start=(2,), shape=(5,))]
    assert got.dtype == torch.int64 and ops.digest_values(got) == want
    assert torch.ops.megarl.slice_digests([x.to("meta"), y.to("meta")], *arguments[1:]).shape == (2,)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_many_boxes_at_once_equal_the_reference(count, backend):
    with backends.on(backend):
        for seed in range(5):
            kernels.many_digests_equal_reference(seed, count, "cpu")


def test_many_boxes_are_shared_out_to_threads():
    """Threads begin and end within boxes, and skip empty ones."""
    x = tensor(9, (70, 4001), torch.bfloat16)
    boxes = [(x[i : i + i % 4], (i, 0), x.shape) for i in range(66)]
    want = [ops.slice_digest_reference(x, start=start, shape=shape) for x, start, shape in boxes]
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            assert ops.digest_values(ops.slice_digests(boxes)) == want
    finally:
        torch.set_num_threads(threads)


def test_a_box_of_more_runs_than_are_counted_is_refused():
    x = torch.zeros(1).expand(2**17, 2**16, 3)
    with pytest.raises(ValueError, match=r"2\*\*32 runs"):
        ops.slice_digest(x, start=(0, 0, 0), shape=(2**17, 2**16, 4))


def test_a_fault_of_one_box_among_many_is_named():
    x = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"a box of \(3, 3\) at start \(2, 0\) does not lie within shape \(4, 3\)"):
        ops.slice_digests([(x, (0, 0), (4, 3)), (x, (2, 0), (4, 3))])


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
        (
            torch.zeros(3, 3),
            (2, 0),
            (4, 3),
            ValueError,
            r"a box of \(3, 3\) at start \(2, 0\) does not lie within shape \(4, 3\)",
        ),
        (torch.zeros(3), (0, 0), (4, 3), ValueError, "x has 1 dimensions"),
        (torch.zeros(3, dtype=torch.complex64), (0,), (3,), TypeError, "not complex"),
        (torch.zeros(3, device="meta"), (0,), (3,), ValueError, "x is on meta"),
        (torch.zeros((1,) * 9), (0,) * 9, (1,) * 9, ValueError, "x has 9 dimensions, at most 8"),
    ],
)
def test_errors_name_the_argument(x, start, shape, error, text):
    with pytest.raises(error, match=text):
        ops.slice_digest(x, start=start, shape=shape)
