"""Causal attention with windows and sinks: scores with a mask in float64, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.learn.models.attention import attend


@pytest.mark.parametrize("window", [None, 1, 4, 8])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("length", [1, 8, 9, 23])
@pytest.mark.parametrize("width", [8, 5], ids=["", "narrow"])
def test_equals_scores_with_a_mask(window: int | None, has_sinks: bool, length: int, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, length, 8), (2, 2, length, 8), (2, 2, length, width), (4,)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    query, key, value, sinks = inputs if has_sinks else (*inputs[:3], None)
    found = attend(query, key, value, scale=0.3, window=window, sinks=sinks)

    double = [x.detach().double().requires_grad_() for x in inputs]
    place = torch.arange(length)
    seen = (place[:, None] >= place) & (place[:, None] - place < (window or length))
    scores = double[0] @ double[1].repeat_interleave(2, 1).mT * 0.3
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = double[3] if has_sinks else double[3] * 0 - 1e9
    sink = sink.view(1, 4, 1, 1).expand(2, 4, length, 1)
    want = torch.cat([scores, sink], -1).softmax(-1)[..., :length] @ double[2].repeat_interleave(2, 1)

    upstream = torch.randn(found.shape, generator=generator)
    used = inputs if has_sinks else inputs[:3]
    grads = torch.autograd.grad(found, used, upstream)
    expected = torch.autograd.grad(want, double, upstream.double())
    assert (found - want).abs().max() < 1e-5
    for grad, other in zip(grads, expected, strict=False):
        assert (grad - other).abs().max() < 1e-5


def test_no_mask_is_as_large_as_the_sequence() -> None:
    """A bucket of 4,096 tokens with a window of 16: a mask of the whole would have 16 million entries."""
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            made.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
            return out

    x = torch.randn(1, 1, 4096, 8)
    with Sizes():
        attend(x, x, x, window=16)
    assert max(made) <= 4 * x.numel()
