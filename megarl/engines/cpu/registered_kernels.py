"""Registration of vLLM's CPU kernels, once for all engines that a fork server starts.

Each worker of vLLM 0.32 registers the same kernels again and looks through every attribute of every imported module for
the kernels that they replace: half a CPU-second of each start. Importing this module registers the kernels, and later
registrations in this process and its forks do nothing.
"""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform


def _register_once() -> None:
    if not isinstance(current_platform, CpuPlatform):
        return
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(_registered)  # type: ignore[assignment]


def _registered(cls: type[CpuPlatform]) -> None:
    """Do nothing: the kernels are registered."""


_register_once()
