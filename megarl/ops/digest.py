"""A 64-bit checksum of tensors whose parts add up: both sides of a weight sync compare without moving weights.

The logical tensor is read as bytes, little endian, its elements in row-major order, and cut into blocks of 8 bytes. A
block whose bits are v (elements that are not there count as 0) and that has n elements adds ``(v + (v >> 32) + n) ·
K(block)``, modulo 2**64. This is linear in the elements, so any split into boxes adds up, even one that cuts through a
block.

K is odd, so a change within one block is always seen, but for blocks whose upper 32 bits are all ones. Changes in
several blocks go unseen with the chance of a random 64-bit number being a multiple of 2**(64 − z), where z ≤ 31 is the
number of low bits (of its 32-bit word) that every change leaves alone. It is a checksum, no protection from someone who
seeks a collision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.ops import checks, native

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_DIMS = 8


def slice_digest(x: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> int:
    """Digest of the box ``x`` that sits at ``start`` in a logical tensor of ``shape``.

    The sum of the digests of disjoint boxes, modulo 2**64, is the digest of what they make up together.
    ``torch.ops.megarl.slice_digest`` is the same without waiting for the device: it returns an int64 scalar tensor.

    Args:
        x: any dtype of 1, 2, 4 or 8 bytes, any strides, as many dimensions (up to 8) as ``shape``, on a CPU or GPU.
        start: index in the logical tensor of ``x``'s first element.
        shape: sizes of the logical tensor.

    Returns:
        An integer in [0, 2**64).

    Raises:
        TypeError, ValueError: for another device or element size, or a box that does not lie in ``shape``.
    """
    _check(x, start, shape)
    if native.twin():
        return slice_digest_reference(x, start=start, shape=shape)
    return int(digest(x, list(start), list(shape))) % 2**64


@native.op(
    "slice_digest(Tensor x, int[] start, int[] shape) -> Tensor",
    fake=lambda x, start, shape: x.new_empty((), dtype=torch.int64),
)
def digest(x: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """:func:`slice_digest` as an int64 scalar tensor (the same 64 bits) where ``x`` lies."""
    _check(x, start, shape)
    result = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return result
    steps = _row_major_steps(shape)
    offset = sum(i * step for i, step in zip(start, steps, strict=True))
    sizes, strides = list(x.shape) or [1], list(x.stride()) or [1]
    native.run("digest", x, x.data_ptr(), x.element_size(), sizes, strides, offset, steps or [1], result.data_ptr())
    return result


def slice_digest_reference(x: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> int:
    """Reference for :func:`slice_digest`, in numpy, element by element."""
    _check(x, start, shape)
    size = x.element_size()
    as_integers = x.detach().cpu().contiguous().view(_INTEGERS[size]).numpy()
    index = np.zeros(tuple(x.shape), dtype=np.uint64)
    for d, (n, first, step) in enumerate(zip(x.shape, start, _row_major_steps(shape), strict=True)):
        along = (np.arange(n, dtype=np.uint64) + np.uint64(first)) * np.uint64(step)
        index += along.reshape([-1 if i == d else 1 for i in range(x.dim())])
    byte = index.reshape(-1) * np.uint64(size)
    with np.errstate(over="ignore"):
        v = as_integers.reshape(-1).view(f"u{size}").astype(np.uint64) << (byte % np.uint64(8) * np.uint64(8))
        content = v + (v >> np.uint64(32)) + np.uint64(1)
        key = (byte // np.uint64(8) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        key = (key ^ (key >> np.uint64(29))) | np.uint64(1)
        return int((content * key).sum(dtype=np.uint64))


def _row_major_steps(shape: Sequence[int]) -> list[int]:
    """Distance in the flat index of neighbours along each dimension."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _check(x: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    checks.device("x", x)
    if x.is_complex() or x.element_size() not in _INTEGERS:
        raise TypeError(f"x must have elements of 1, 2, 4 or 8 bytes that are not complex, got {x.dtype}")
    if not x.dim() == len(start) == len(shape):
        raise ValueError(f"x has {x.dim()} dimensions, start {tuple(start)} and shape {tuple(shape)} must have as many")
    if x.dim() > _MAX_DIMS:
        raise ValueError(f"x has {x.dim()} dimensions, at most {_MAX_DIMS} are supported; reshape it")
    if any(not 0 <= lo <= lo + n <= size for lo, n, size in zip(start, x.shape, shape, strict=True)):
        raise ValueError(f"a box of {tuple(x.shape)} at start {tuple(start)} does not lie within shape {tuple(shape)}")
    if math.prod(shape) * x.element_size() > 2**63:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} and {x.element_size()} bytes an element has more than 2**63 bytes"
        )
