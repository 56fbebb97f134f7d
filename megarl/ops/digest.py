"""A 64-bit checksum of tensors whose parts add up: both sides of a weight sync compare without moving weights.

``digest = Σ mix(flat index in the logical tensor, element bits) mod 2**64``; mix is splitmix64's finaliser over
``bits + (index + 1) · 0x9E3779B97F4A7C15``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.ops import checks, native

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slice_digest(x: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> int:
    """Digest of the box ``x`` that sits at ``start`` in a logical tensor of ``shape``.

    The sum of the digests of disjoint boxes, modulo 2**64, is the digest of what they make up together.

    Args:
        x: any dtype of 1, 2, 4 or 8 bytes, any strides, as many dimensions as ``shape``, on the CPU.
        start: index in the logical tensor of ``x``'s first element.
        shape: sizes of the logical tensor.

    Returns:
        An integer in [0, 2**64).

    Raises:
        TypeError, ValueError: for another device or element size, or a box that does not lie in ``shape``.
    """
    _check(x, start, shape)
    if x.numel() == 0:
        return 0
    steps = _row_major_steps(shape)
    offset = sum(i * step for i, step in zip(start, steps, strict=True))
    sizes, strides = list(x.shape) or [1], list(x.stride()) or [1]
    digest = torch.empty(1, dtype=torch.int64, device=x.device)
    native.run("digest", x, x.data_ptr(), x.element_size(), sizes, strides, offset, steps or [1], digest.data_ptr())
    return int(digest) % 2**64


def slice_digest_reference(x: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> int:
    """What :func:`slice_digest` computes, in numpy."""
    _check(x, start, shape)
    as_integers = x.detach().view(_INTEGERS[x.element_size()]).numpy()
    element_bits = as_integers.reshape(-1).view(f"u{x.element_size()}").astype(np.uint64)
    index = np.zeros(tuple(x.shape), dtype=np.uint64)
    for d, (size, first, step) in enumerate(zip(x.shape, start, _row_major_steps(shape), strict=True)):
        along = (np.arange(size, dtype=np.uint64) + np.uint64(first)) * np.uint64(step)
        index += along.reshape([-1 if i == d else 1 for i in range(x.dim())])
    with np.errstate(over="ignore"):
        h = element_bits + (index.reshape(-1) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((h ^ (h >> np.uint64(31))).sum(dtype=np.uint64))


def _row_major_steps(shape: Sequence[int]) -> list[int]:
    """How far apart in the flat index neighbours along each dimension are."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _check(x: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> None:
    checks.device("x", x)
    if x.is_complex() or x.element_size() not in _INTEGERS:
        raise TypeError(f"x must have elements of 1, 2, 4 or 8 bytes that are not complex, got {x.dtype}")
    if not x.dim() == len(start) == len(shape):
        raise ValueError(f"x has {x.dim()} dimensions, start {tuple(start)} and shape {tuple(shape)} must have as many")
    if any(not 0 <= lo <= lo + n <= size for lo, n, size in zip(start, x.shape, shape, strict=True)):
        raise ValueError(f"a box of {tuple(x.shape)} at start {tuple(start)} does not lie within shape {tuple(shape)}")
