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


def offsets(name: str, cu: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Raise TypeError or ValueError naming ``name`` unless ``cu`` [N + 1] rises from 0 to the tokens of ``like`` [T].

    The values are looked at on the CPU only: elsewhere that would make the CPU wait for the device, and the kernels
    clamp them into [0, T] instead. Tokens in no sequence then get 0.

    Returns:
        ``cu`` as contiguous int64.
    """
    tensor(name, cu, dtypes=(torch.int32, torch.int64), shape=(None,), like=like)
    if cu.shape[0] == 0:
        raise ValueError(f"{name} must rise from 0 to the number of tokens {like.shape[0]}, got []")
    rising = cu.long().contiguous()
    if cu.device.type != "cpu" or torch.compiler.is_compiling():
        return rising
    if rising[0] != 0 or rising[-1] != like.shape[0] or (rising.diff() < 0).any():
        raise ValueError(f"{name} must rise from 0 to the number of tokens {like.shape[0]}, got {cu.tolist()[:8]}")
    return rising


def device(name: str, x: torch.Tensor, *, meta: bool = False) -> None:
    """Raise ValueError unless ``x`` lies where there are kernels, or on meta where only its shape is asked for."""
    if x.device.type not in ("cpu", "cuda") and not (meta and x.is_meta):
        raise ValueError(f"{name} is on {x.device}; megarl's kernels run on CPU and CUDA tensors, move it with .cpu()")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
