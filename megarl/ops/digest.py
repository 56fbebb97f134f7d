"""A 64-bit checksum of tensors that adds up over parts: both sides of a weight sync compare it without moving weights.

The logical tensor's elements, in row-major order, are bytes in little endian, cut into blocks of 8. A block adds
``(v + (v >> 32) + n) · K(block)`` mod 2**64: v is the block as an integer (missing elements count as 0), n its number
of elements. The digest is linear in the elements. So the digests of any split into boxes add up, even one that cuts
through a block.

K is odd, so a change within one block is always detected, except for blocks with upper 32 bits of all ones. Changes in
several blocks go undetected with the probability that a random 64-bit number is a multiple of 2**(64 − z). z ≤ 31 is
the number of low bits, of their 32-bit words, that none of the changes touches. This is no protection against
deliberate collisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.ops import native

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_DIMS = 8


Box = tuple[torch.Tensor, Sequence[int], Sequence[int]]
"""A box ``x`` of a logical tensor: x, start (index of x's first element there), shape (of the logical tensor)."""


def slice_digest(x: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> int:
    """Digest of one box, as in :func:`slice_digests`; waits for the device.

    Returns:
        An integer in [0, 2**64).
    """
    return digest_values(slice_digests([(x, start, shape)]))[0]


def slice_digests(boxes: Sequence[Box]) -> torch.Tensor:
    """Digests of many boxes, in one launch, without waiting for the device.

    The sum of the digests of disjoint boxes, modulo 2**64, is the digest of their union.

    Args:
        boxes: (x, start, shape) each. x has any dtype of 1, 2, 4 or 8 bytes, any strides, and as many dimensions (up to
            8) as the logical tensor; all are on one device. On a GPU several boxes need 240 bytes each, copied and
            freed in the order of the current stream. At most 2**30 boxes and 8 TiB there.

    Returns:
        int64 [boxes] on that device; on the CPU if there are no boxes. :func:`digest_values` converts it to integers.

    Raises:
        TypeError, ValueError: unsupported device or element size, or a box outside its shape.
    """
    if not boxes:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if native.twin():
        values = [slice_digest_reference(x, start=start, shape=shape) for x, start, shape in boxes]
        return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).to(boxes[0][0].device)
    for box in boxes:
        _check_form(*box)
    starts, shapes = ([n for box in boxes for n in box[part]] for part in (1, 2))
    return digests([x for x, _, _ in boxes], starts, shapes)  # type: ignore[no-any-return]


def digest_values(digests: torch.Tensor) -> list[int]:
    """Convert int64 [n] digests to integers in [0, 2**64); waits for the device."""
    return [digest % 2**64 for digest in digests.tolist()]


@native.op(
    "slice_digests(Tensor[] xs, int[] starts, int[] shapes) -> Tensor",
    fake=lambda xs, starts, shapes: xs[0].new_empty(len(xs), dtype=torch.int64),
)
def digests(xs: Sequence[torch.Tensor], starts: Sequence[int], shapes: Sequence[int]) -> torch.Tensor:
    """:func:`slice_digests` of at least one box; ``starts`` and ``shapes`` are concatenated over the boxes."""
    device, rows, at = xs[0].device, list[int](), 0
    for x in xs:
        dims = x.dim()
        start, shape = starts[at : at + dims], shapes[at : at + dims]
        at += dims
        _check_place(x, start, shape)
        if x.device != device:
            raise ValueError(f"boxes must lie on one device, got {device} and {x.device}")
        steps = _row_major_steps(shape)
        offset = sum(i * step for i, step in zip(start, steps, strict=True))
        rows += [x.data_ptr(), x.element_size(), offset, dims, *x.shape, *x.stride(), *steps]
    copied = device.type != "cpu" and len(xs) > 1
    nbytes = len(xs) * native.library.DIGEST_BOX_BYTES
    table = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=copied)
    pieces = native.library.digest_table(rows, len(xs), table.data_ptr())
    if pieces < 0:
        raise ValueError("a box consists of 2**32 runs or more; digest it in parts")
    if copied:
        table = table.to(device, non_blocking=True)
    result = torch.empty(len(xs), dtype=torch.int64, device=device)
    native.run("digests", result, table.data_ptr(), len(xs), pieces, result.data_ptr())
    return result


def slice_digest_reference(x: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> int:
    """Reference for :func:`slice_digest`, in numpy, element by element."""
    _check_form(x, start, shape)
    _check_place(x, start, shape)
    size = x.element_size()
    # A copy, because a numpy view of the storage would stop resize_(0) from freeing it.
    copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    as_integers = copy.view(_INTEGERS[size]).numpy()
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
    """Distance in the flat index between neighbours along each dimension."""
    steps = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        steps[d - 1] = steps[d] * shape[d]
    return steps


def _check_form(x: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    native.device("x", x)
    if not x.dim() == len(start) == len(shape):
        raise ValueError(f"x has {x.dim()} dimensions, start {tuple(start)} and shape {tuple(shape)} must have as many")


def _check_place(x: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> None:
    if len(start) > _MAX_DIMS:
        raise ValueError(f"x has {x.dim()} dimensions, at most {_MAX_DIMS} are supported; reshape it")
    if x.is_complex() or x.element_size() not in _INTEGERS:
        raise TypeError(f"x must have elements of 1, 2, 4 or 8 bytes that are not complex, got {x.dtype}")
    for first, extent, size in zip(start, x.shape, shape, strict=True):
        if not 0 <= first <= first + extent <= size:
            raise ValueError(
                f"a box of {tuple(x.shape)} at start {tuple(start)} does not lie within shape {tuple(shape)}"
            )
    if math.prod(shape) * x.element_size() > 2**63:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} and {x.element_size()} bytes an element has more than 2**63 bytes"
        )
