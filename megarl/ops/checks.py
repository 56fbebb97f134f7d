"""Argument checks of the ops: the C++ core trusts its pointers, so each fault is named here."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tensor(
    name: str,
    x: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None] | None = None,
    like: torch.Tensor | None = None,
) -> None:
    """Raise TypeError or ValueError naming ``name`` unless ``x`` is a tensor of one of ``dtypes`` on a CPU or a GPU.

    Args:
        shape: expected sizes, None for any.
        like: a tensor on whose device ``x`` must lie.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(_short(d) for d in dtypes)}, got {_short(x.dtype)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device} but must be on {like.device} like the other arguments")
    device(name, x, meta=True)
    if shape is not None:
        fits = x.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape, strict=True))
        if not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise ValueError(f"{name} must have shape [{wanted}], got {list(x.shape)}")


def device(name: str, x: torch.Tensor, *, meta: bool = False) -> None:
    """Raise ValueError unless ``x`` lies where there are kernels, or on meta where only its shape is asked for."""
    if x.device.type not in ("cpu", "cuda") and not (meta and x.is_meta):
        raise ValueError(f"{name} is on {x.device}; megarl's kernels run on CPU and CUDA tensors, move it with .cpu()")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
