"""Kernel calls on a tensor's device, argument checks, and registration of ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import torch

from megarl import _C

REFERENCE = (torch.float32, torch.float64)
"""Dtypes of the plain-torch references: float64 for exact values and gradient checks."""


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
        shape: expected sizes; ``None`` for any size.
        like: tensor on the device where ``x`` must be.
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
    """Raise TypeError or ValueError naming ``name`` unless ``cu`` has the type and shape of [N + 1] packed row offsets.

    Returns:
        ``cu`` as contiguous int64. :func:`rising` checks the values.
    """
    tensor(name, cu, dtypes=(torch.int32, torch.int64), shape=(None,), like=like)
    if cu.shape[0] == 0:
        raise ValueError(f"{name} must rise from 0 to the number of tokens {like.shape[0]}, got []")
    return cu.long().contiguous()


def rising(name: str, cu: torch.Tensor, tokens: int) -> None:
    """Raise ValueError unless ``cu`` rises from 0 to ``tokens``; checks CPU tensors only. On a GPU the CPU would have
    to wait, so kernels clamp the values instead. While a compiler traces, the values are unknown; the op checks them
    when it runs."""
    if torch.compiler.is_compiling() or cu.device.type != "cpu":
        return
    if cu[0] != 0 or cu[-1] != tokens or bool((cu.diff() < 0).any()):
        raise ValueError(f"{name} must rise from 0 to the number of tokens {tokens}, got {cu.tolist()[:8]}")


def number(name: str, x: float, *, low: float = -math.inf, high: float = math.inf, finite: bool = True) -> None:
    """Raise TypeError or ValueError naming ``name`` unless ``x`` is an int or float within [low, high], not NaN."""
    if not isinstance(x, int | float) or isinstance(x, bool):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    # Only comparisons: a compiler may trace x as a symbol.
    if finite and not -math.inf < x < math.inf:
        raise ValueError(f"{name} must be finite, got {x}")
    if not low <= x <= high:
        wanted = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {wanted}, got {x}")


def device(name: str, x: torch.Tensor, *, meta: bool = False) -> None:
    """Raise ValueError unless ``x`` is on a device with kernels, or on meta if ``meta`` allows it."""
    if x.device.type not in ("cpu", "cuda") and not (meta and x.is_meta):
        raise ValueError(f"{name} is on {x.device}; megarl's kernels run on CPU and CUDA tensors, move it with .cpu()")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


library: ModuleType = _C
"""The extension. Tests replace it by another build: kernels in float64, or CUDA kernels emulated on the CPU."""

runs_twins = False
"""True if ``use`` has selected the plain-torch twins; read it with :func:`twin`."""
_torch_library = torch.library.Library("megarl", "DEF")


def use(implementation: Literal["megarl", "torch"]) -> None:
    """Select megarl's kernels or their plain-torch twins for the ops. Twins are slower and need more memory; they help
    to separate your bugs from ours."""
    global runs_twins
    if implementation not in ("megarl", "torch"):
        raise ValueError(f"implementation must be megarl or torch, got {implementation!r}")
    runs_twins = implementation == "torch"


def twin() -> bool:
    """True if ``use("torch")`` selected the plain-torch twins."""
    return runs_twins


def real() -> torch.dtype:
    """Dtype of log-probs, statistics and losses: float32, or float64 in the build for gradient checks."""
    return torch.float64 if library.REAL == "float64" else torch.float32


def address(x: torch.Tensor | None) -> int:
    """Address of ``x``; 0 for ``None``. The caller must keep ``x`` alive until the kernel was called."""
    return 0 if x is None else x.data_ptr()


def run(name: str, like: torch.Tensor, *arguments: Any) -> None:
    """Call kernel ``name`` on the device of ``like``: on torch's threads, or on the current CUDA stream.

    Raises:
        RuntimeError: the device has no kernel, or the launch failed.
    """
    if like.device.type == "cpu":
        getattr(library.cpu, name)(*arguments, torch.get_num_threads())
        return
    with torch.cuda.device(like.device):
        getattr(cuda(), name)(*arguments, torch.cuda.current_stream().cuda_stream)


def cuda() -> Any:
    """Return the CUDA kernels. Raises RuntimeError if the extension was built without them."""
    if not hasattr(library, "cuda"):
        raise RuntimeError(
            "megarl was built without CUDA kernels; install it again where nvcc is on the PATH (`pip install -e .`), "
            "or set trainer.kernels=torch"
        )
    return library.cuda


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as ``torch.ops.megarl.<name of schema>`` for CPU and CUDA tensors; returns the op.

    Args:
        fake: returns empty results of the right shapes, for ``torch.compile`` and meta tensors.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = schema.split("(")[0]
        _torch_library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _torch_library.impl(name, function, key)
        torch.library.register_fake(f"megarl::{name}", fake, lib=_torch_library)
        return getattr(torch.ops.megarl, name).default

    return register
