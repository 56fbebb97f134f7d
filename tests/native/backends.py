"""Runs the ops of ``megarl.ops`` on another build of the kernels, on CPU tensors.

``@pytest.mark.parametrize("backend", BACKENDS)`` and ``with backends.on(backend):`` repeat a test over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.ops import native
from tests.native import build

BACKENDS = ("cpu", "emulated")
"""Kernels in float32: the installed extension's on the CPU, and the CUDA kernels run by the emulator."""

_INSTALLED = (native.library, native.run)

DOUBLE = ("cpu double", "emulated double")
"""The same in float64, for gradient checks. They know no 16-bit logits."""


@contextmanager
def on(backend: str) -> Iterator[None]:
    """Within it, ops on CPU tensors run the kernels of ``backend``, or the plain twins where that is "torch"."""
    if backend == "torch":
        native.use("torch")
        try:
            yield
        finally:
            native.use("megarl")
        return
    before = native.library, native.run
    emulated, double = "emulated" in backend, "double" in backend
    # A build with emulated kernels has the CPU's too: one build serves both.
    extension = _INSTALLED[0] if backend == "cpu" else build.extension(emulated=True, double=double)

    def emulate(name: str, like: torch.Tensor, *arguments: Any) -> None:
        assert like.device.type == "cpu"
        getattr(extension.cuda, name)(*arguments, 0)

    native.library, native.run = extension, emulate if emulated else _INSTALLED[1]
    try:
        yield
    finally:
        native.library, native.run = before
