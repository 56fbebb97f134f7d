"""The CUDA kernels, compiled for the host and run thread by thread (tests/native), against float64 and the CPU
twins."""

from __future__ import annotations

import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import ops
from megarl.ops import native
from tests.conftest import examples
from tests.native import backends, build, kernels
from tests.unit.test_ops_logprob import by_shards, make_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

cases = st.builds(
    make_case,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    vocab_size=st.one_of(st.integers(1, 300), st.integers(1000, 3000), st.sampled_from([4096, 40_001, 33_000])),
    shards=st.integers(1, 8),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    scale=st.sampled_from([0.1, 4.0, 30.0]),
    offset=st.sampled_from([0.0, 50.0, -200.0]),
    dtype=st.sampled_from(DTYPES),
)


@pytest.fixture(autouse=True)
def _emulated():
    with backends.on("emulated"):
        yield


def test_the_emulated_kernels_are_what_runs():
    assert native.library.CUDA_STATE == "emulated" and native.run.__name__ == "emulate"


@settings(max_examples=examples(25, 120))
@given(cases)
def test_logprob_is_close_to_float64(case):
    kernels.close_to_float64(case, "cpu")


@settings(max_examples=20)
@given(cases)
def test_logprob_is_close_to_the_cpu_twin(case):
    emulated = by_shards(case)
    with backends.on("cpu"):
        twin = by_shards(case)
    for got, want in zip(emulated[:2], twin[:2], strict=True):
        assert ((got - want).abs() <= 2e-6 * want.abs().clamp(min=1)).all()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    width=st.sampled_from([1501, 2056, 5003]),
    row=st.integers(0, 39),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_has_the_same_bits_whatever_surrounds_it(seed, width, row, dtype):
    kernels.same_bits_alone_and_again(make_case(seed, 40, width, 1, dtype=dtype), row, "cpu")


@settings(max_examples=25)
@given(case=cases, shift=st.integers(0, 9), gap=st.integers(0, 20))
def test_misaligned_and_strided_rows(case, shift, gap):
    kernels.misaligned_and_strided_rows_change_no_bits(case, shift, gap, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [9, 2500, 33_001])
def test_special_rows(dtype, vocab_size):
    kernels.special_rows(dtype, vocab_size, "cpu")


def test_more_rows_than_a_grid_has_in_y():
    kernels.many_rows("cpu")


def test_a_million_columns_keep_their_accuracy():
    kernels.a_long_row("cpu")


@settings(max_examples=examples(50, 240))
@given(seed=st.integers(0, 2**31), dims=st.integers(1, 8), dtype=st.sampled_from(kernels.DIGESTED))
def test_digest_equals_the_reference(seed, dims, dtype):
    kernels.digest_equals_reference(*kernels.a_box(seed, dims, dtype), "cpu")


@settings(max_examples=examples(80, 400))
@given(
    width=st.one_of(
        st.integers(1, 40),
        st.sampled_from([n * b + d for n in (32, 128, 256, 1024) for b in (1, 4) for d in (-1, 0, 1)]),
    ),
    rows=st.sampled_from([1, 2, 3, 7, 33]),
    shift=st.integers(0, 9),
    gap=st.sampled_from([0, 1, 8]),
    dtype=st.sampled_from(kernels.DIGESTED),
)
def test_digests_of_lines_around_the_borders_of_blocks_rounds_and_pieces(width, rows, shift, gap, dtype):
    kernels.lines_equal_reference(width, rows, shift, gap, dtype, "cpu")


@settings(max_examples=examples(10, 60))
@given(seed=st.integers(0, 2**31), count=st.sampled_from([0, 1, 2, 31, 32, 33, 100]))
def test_digests_of_many_boxes_in_one_launch(seed, count):
    kernels.many_digests_equal_reference(seed, count, "cpu")


def test_more_boxes_than_a_warp_finds_at_once():
    """Boxes of one piece and of none, more of them than 32 x 32."""
    x = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    boxes = [(x[i : i + i % 3], (i,), (5000,)) for i in range(2500)]
    emulated = ops.slice_digests(boxes)
    with backends.on("cpu"):
        assert torch.equal(emulated, ops.slice_digests(boxes))
    assert len(emulated.unique()) > 1600


def test_digest_of_more_work_than_one_grid():
    x = torch.randint(0, 256, (70 << 20,), dtype=torch.uint8)
    emulated = ops.slice_digest(x, start=[3], shape=[80 << 20])
    with backends.on("cpu"):
        assert emulated == ops.slice_digest(x, start=[3], shape=[80 << 20])


@pytest.mark.parametrize("backend", backends.DOUBLE)
@pytest.mark.parametrize("vocab_size", [7, 6])  # the whole, and one column of padding
def test_gradients_by_finite_differences(backend, vocab_size):
    g = torch.Generator().manual_seed(4)
    logits = (torch.randn(4, 7, generator=g, dtype=torch.float64) * 2).requires_grad_()
    targets = torch.tensor([0, 5, -100, 3])
    with backends.on(backend):
        assert torch.autograd.gradcheck(
            lambda x: ops.vocab_parallel_logprob(
                x, targets, vocab_size=vocab_size, temperature=0.7, inplace_backward=False
            ),
            (logits,),
        )


FAULTS = {
    0: "",
    1: "not every thread of the block reaches the __syncthreads()",
    2: "threads of one block stand at different __syncthreads()",
    3: "not every lane of the warp reaches the shuffle",
    4: "a block that uses shuffles must consist of whole warps",
}
PROGRAM = """
#include "cuda/device.h"
__global__ void kernel(int fault, int* out) {
  const int v = megarl::warp_reduce((int)threadIdx.x, [](int a, int b) { return a + b; });
  if (fault == 1 && threadIdx.x == 77) return;
  if (fault == 2 && threadIdx.x % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (fault == 3 && threadIdx.x != 5) __syncwarp();
  out[threadIdx.x] = v;
}
int main(int, char** argv) {
  const int fault = atoi(argv[1]), threads = fault == 4 ? 100 : 128;
  int out[128];
  MEGARL_LAUNCH(kernel, dim3(3), dim3(threads), nullptr, fault, out);
  for (int i = 0; i < threads; ++i)
    if (out[i] != i / 32 * 32 * 32 + 496) return 3;
  MEGARL_LAUNCH(kernel, dim3(1, 65536), dim3(128), nullptr, fault, out);
  return cudaGetLastError() == cudaErrorInvalidConfiguration ? 0 : 4;
}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.cu").write_text(PROGRAM)
    command = [
        "g++",
        "-x",
        "c++",
        "-std=c++17",
        "-O1",
        "-DMEGARL_EMULATED",
        f"-I{build.ROOT}/tests/native",
        f"-I{build.ROOT}/csrc",
    ]
    subprocess.run([*command, str(folder / "faulty.cu"), "-o", str(folder / "faulty")], check=True)
    return folder / "faulty"


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_ends_kernels_that_would_hang(faulty, fault):
    done = subprocess.run([str(faulty), str(fault)], capture_output=True, text=True, timeout=20)
    assert FAULTS[fault] in done.stderr and (done.returncode == 0) == (fault == 0)
