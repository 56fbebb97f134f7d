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

DOUBLE = ("cpu double", "emulated double")
"""The same in float64, for gradient checks. They know no 16-bit logits."""


@contextmanager
def on(backend: str) -> Iterator[None]:
    """Within it, ops on CPU tensors run the kernels of ``backend``."""
    library, run = native.library, native.run
    if backend == "cpu":
        yield
        return
    emulated, double = "emulated" in backend, "double" in backend
    extension = build.extension(emulated=emulated, double=double)

    def emulate(name: str, like: torch.Tensor, *arguments: Any) -> None:
        assert like.device.type == "cpu"
        getattr(extension.cuda, name)(*arguments, 0)

    native.library = extension
    if emulated:
        native.run = emulate
    try:
        yield
    finally:
        native.library, native.run = library, run
