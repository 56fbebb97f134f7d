"""Calls of the kernels that run where a tensor lies, and the registry of ops that ``torch.compile`` sees."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import torch

from megarl import _C

library: ModuleType = _C
"""The extension. Tests put another build in its place: kernels in float64, or CUDA kernels emulated on the CPU."""

runs_twins = False
"""True once ``use`` has chosen the plain-torch twins; :func:`twin` returns it."""
_torch_library = torch.library.Library("megarl", "DEF")


def use(implementation: Literal["megarl", "torch"]) -> None:
    """Run the ops by megarl's kernels, or by their plain-torch twins (slower, larger; to separate one's own faults from
    ours)."""
    global runs_twins
    if implementation not in ("megarl", "torch"):
        raise ValueError(f"implementation must be megarl or torch, got {implementation!r}")
    runs_twins = implementation == "torch"


def twin() -> bool:
    """Did ``use("torch")`` choose the plain-torch twins?"""
    return runs_twins


def real() -> torch.dtype:
    """The type of log-probs, statistics and losses: float32, but for the build that gradient checks run on."""
    return torch.float64 if library.REAL == "float64" else torch.float32


def address(x: torch.Tensor | None) -> int:
    """Address of ``x``; 0 for None. The caller keeps ``x`` alive until the kernel has been called."""
    return 0 if x is None else x.data_ptr()


def run(name: str, like: torch.Tensor, *arguments: Any) -> None:
    """Call kernel ``name`` where ``like`` lies: on torch's threads, or on the device's current stream.

    Raises:
        RuntimeError: there is no kernel for this device, or it could not be launched.
    """
    if like.device.type == "cpu":
        getattr(library.cpu, name)(*arguments, torch.get_num_threads())
        return
    with torch.cuda.device(like.device):
        getattr(cuda(), name)(*arguments, torch.cuda.current_stream().cuda_stream)


def cuda() -> Any:
    """The CUDA kernels, if the extension has them."""
    if not hasattr(library, "cuda"):
        raise RuntimeError(
            "megarl was built without CUDA kernels; install it again where nvcc is on the PATH (`pip install -e .`), "
            "or set trainer.kernels=torch"
        )
    return library.cuda


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as ``torch.ops.megarl.<name of schema>`` for CPU and CUDA tensors; returns the op.

    Args:
        fake: gives empty results of the right shapes, for ``torch.compile`` and meta tensors.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = schema.split("(")[0]
        _torch_library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _torch_library.impl(name, function, key)
        torch.library.register_fake(f"megarl::{name}", fake, lib=_torch_library)
        return getattr(torch.ops.megarl, name).default

    return register
