"""The log-prob op as torch sees it: registered, traced by torch.compile, known on meta tensors."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from megarl import ops
from megarl.ops import logprob

SHARD = (0, 50, 0.7)


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(6, 53, generator=g).to(dtype), torch.tensor([0, 49, -100, 7, 20, 33])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registration_passes_torchs_own_checks(dtype):
    logits, targets = _inputs(dtype)
    torch.library.opcheck(logprob.local_stats, (logits, targets, *SHARD))
    stats = logprob.local_stats(logits, targets, *SHARD)[None]
    torch.library.opcheck(logprob.combine_stats, (stats, targets, SHARD[-1]))
    logp, entropy, norm = logprob.combine_stats(stats, targets, SHARD[-1])
    upstream = (targets, norm, entropy, torch.ones_like(logp), None)
    torch.library.opcheck(logprob.gradient, (logits, *upstream, *SHARD))
    torch.library.opcheck(logprob.gradient_, (logits.clone(), *upstream, *SHARD))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_training_step_equals_eager(backend):
    def step(weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logp, entropy = ops.vocab_parallel_logprob(weight * 2, targets, vocab_size=50, temperature=0.7)
        return (logp + 0.1 * entropy).sum()

    values, targets = _inputs()
    torch.compiler.reset()
    counters.clear()
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
        weight = values.clone().requires_grad_()
        loss = run(weight, targets)
        loss.backward()
        results.append((loss.detach(), weight.grad))
    assert counters["stats"]["unique_graphs"] == 1, "nothing was compiled: is TORCHDYNAMO_DISABLE set?"
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_cuda_kernels_are_built_where_nvcc_is():
    """They cannot run here, but CI must notice when they no longer compile."""
    assert ops.has_cuda_kernels(), ops.backend()["CUDA tensors"]


def test_meta_tensors_give_shapes_and_cost_nothing():
    logits = torch.empty(8192, 151_936, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(8192, dtype=torch.int64, device="meta")
    logp, entropy = ops.vocab_parallel_logprob(logits * 1, targets, vocab_size=151_936)
    assert logp.shape == entropy.shape == (8192,) and logp.dtype == torch.float32 and logp.is_meta
    (logp + entropy).sum().backward()
    assert logits.grad.shape == logits.shape and logits.grad.dtype == torch.bfloat16
