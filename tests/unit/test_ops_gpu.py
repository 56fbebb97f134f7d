"""The same checks as under the emulator, on a GPU, and what only a GPU can show: memory, streams, large shapes."""

from __future__ import annotations

import pytest
import torch

from megarl import ops
from megarl.ops import logprob, native
from tests.native import kernels
from tests.unit.test_ops_logprob import by_shards, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not hasattr(native.library, "cuda"), reason="megarl was built without CUDA kernels (no nvcc)"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("vocab_size", [1, 7, 257, 2049, 18_992, 40_001, 151_936])
def test_logprob_is_close_to_float64(vocab_size, shards, dtype):
    for seed, (temperature, scale, offset) in enumerate([(1.0, 4.0, 0.0), (0.6, 0.1, 50.0), (2.5, 30.0, -200.0)]):
        case = make_case(seed, 6, vocab_size, shards, temperature, scale, offset, dtype)
        kernels.close_to_float64(case, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 1501, 2056, 5003, 151_936])
def test_a_row_has_the_same_bits_whatever_surrounds_it(width, dtype):
    for row in (0, 1, 77, 299):
        kernels.same_bits_alone_and_again(make_case(row, 300, width, 1, dtype=dtype), row, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 13, 2049, 33_001])
@pytest.mark.parametrize("shift", range(9))
def test_misaligned_and_strided_rows(width, shift, dtype):
    for gap in (0, 3, 16):
        kernels.misaligned_and_strided_rows_change_no_bits(
            make_case(shift, 5, width, 1, dtype=dtype), shift, gap, "cuda"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [9, 2500, 33_001])
def test_special_rows(dtype, vocab_size):
    kernels.special_rows(dtype, vocab_size, "cuda")


def test_more_rows_than_a_grid_has_in_y():
    kernels.many_rows("cuda")


def test_a_million_columns_keep_their_accuracy():
    kernels.a_long_row("cuda")


def test_sixteen_bit_conversions_are_exact_and_rounded_like_torch():
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        finite = patterns[patterns.isfinite()].cuda()
        stats = logprob.local_stats(
            finite[:, None].contiguous(), torch.zeros(len(finite), dtype=torch.int64).cuda(), 0, 1, 1.0
        )
        assert torch.equal(stats[:, 0], finite.float()) and torch.equal(stats[:, 3], finite.float())
        case = kernels.on(make_case(3, 400, 50, 1, dtype=dtype), "cuda")
        stats = logprob.local_stats(case.logits, case.targets, 0, 50, 1.0)
        _, entropy, norm = logprob.combine_stats(stats[None], case.targets, 1.0)
        g = case.grad_logp * torch.logspace(-7, 5, 400).cuda()
        upstream = (case.targets, norm, entropy, g, case.grad_entropy, 0, 50, 1.0)
        want = logprob.gradient(case.logits.float(), *upstream).to(dtype)
        assert torch.equal(logprob.gradient(case.logits, *upstream), want)


def test_offsets_beyond_two_to_the_31():
    rows, cols = 15_000, 151_936
    if torch.cuda.mem_get_info()[0] < 3 * rows * cols:
        pytest.skip(f"needs {3 * rows * cols / 2**30:.0f} GiB of free GPU memory")
    logits = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")
    targets = torch.randint(0, cols, (rows,), device="cuda")
    last = logits[-1:].clone()
    got = ops.vocab_parallel_logprob(logits, targets, vocab_size=cols)
    want = ops.vocab_parallel_logprob(last, targets[-1:], vocab_size=cols)
    assert torch.equal(got[0][-1:], want[0]) and torch.equal(got[1][-1:], want[1])
    digest = ops.slice_digest(logits, start=(0, 0), shape=logits.shape)
    parts = [ops.slice_digest(x, start=(i * 5000, 0), shape=logits.shape) for i, x in enumerate(logits.split(5000))]
    assert sum(parts) % 2**64 == digest


def test_no_second_logits_buffer_exists():
    rows, cols = 2048, 151_936
    leaf = torch.randn(rows, 1, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, cols, (rows,), device="cuda")
    logits = leaf.expand(rows, cols).clone()
    gradients = []
    logits.register_hook(lambda g: gradients.append(g.data_ptr()))
    with kernels.peak_memory_below(64 * rows):
        logp, entropy = ops.vocab_parallel_logprob(logits, targets, vocab_size=cols)
    with kernels.peak_memory_below(256 * rows):
        torch.autograd.grad((logp.sum() + entropy.sum()), logits)
    assert gradients == [logits.data_ptr()] or not gradients


def test_kernels_run_on_the_current_stream_and_can_be_captured():
    case = kernels.on(make_case(1, 64, 5003, 1, dtype=torch.bfloat16), "cuda")
    want = by_shards(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        by_shards(case)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        got = by_shards(case)
        digest = ops.slice_digests([(case.logits, (0, 0), case.logits.shape)])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert ops.digest_values(digest) == [ops.slice_digest_reference(case.logits, start=(0, 0), shape=case.logits.shape)]


def test_autograd_agrees_with_the_reference():
    case = kernels.on(make_case(2, 50, 1000, 1), "cuda")
    grads = []
    for op in (ops.vocab_parallel_logprob, ops.vocab_parallel_logprob_reference):
        leaf = case.logits.clone().requires_grad_()
        logp, entropy = op(leaf * 1, case.targets, vocab_size=1000, temperature=0.8)
        (logp * case.grad_logp + entropy * case.grad_entropy).sum().backward()
        grads.append(leaf.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-5


@pytest.mark.parametrize("dims", range(1, 9))
@pytest.mark.parametrize("dtype", kernels.DIGESTED)
def test_digest_equals_the_reference(dims, dtype):
    for seed in range(20):
        kernels.digest_equals_reference(*kernels.a_box(seed, dims, dtype), "cuda")


@pytest.mark.parametrize("dtype", kernels.DIGESTED)
@pytest.mark.parametrize("width", [1, 3, 31, 32, 33, 128, 255, 256, 257, 1023, 1024, 1025, 4096, 4100])
def test_digests_of_lines_around_the_borders_of_blocks_rounds_and_pieces(width, dtype):
    for rows, shift, gap in ((1, 0, 0), (2, 4, 8), (7, 1, 0), (33, 0, 8), (33, 3, 1)):
        kernels.lines_equal_reference(width, rows, shift, gap, dtype, "cuda")


@pytest.mark.parametrize("count", [2, 32, 33, 1100])
def test_digests_of_many_boxes_in_one_launch(count):
    kernels.many_digests_equal_reference(7, count, "cuda")


def test_digests_of_many_boxes_do_not_wait_for_the_device():
    x = torch.randn(64, 4096, device="cuda")
    boxes = [(x[i], (i * 4096,), (64 * 4096,)) for i in range(64)]
    ops.slice_digests(boxes)  # pinned memory is there
    torch.cuda.set_sync_debug_mode("error")
    try:
        digests = ops.slice_digests(boxes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(ops.digest_values(digests)) % 2**64 == ops.slice_digest(x, start=(0, 0), shape=x.shape)


def test_digest_of_a_large_tensor_equals_the_cpu():
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(5000, 4096).to(dtype)
        for view, start in ((x, (0, 0)), (x[:, 1:4001], (3, 5)), (x.T, (0, 0))):
            shape = [n + 9 for n in view.shape]
            assert ops.slice_digest(view.cuda(), start=start, shape=shape) == ops.slice_digest(
                view, start=start, shape=shape
            )
