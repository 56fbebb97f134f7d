"""Host memory that a process copies to and from often: whole pages, registered with CUDA where a GPU is."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch

log = logging.getLogger(__name__)

HUGE_PAGE = 2**21
"""Bytes of a huge page on x86-64 and most ARM systems."""
_pinned: dict[int, torch.Tensor] = {}
"""Address -> memory registered with CUDA, kept referenced so that it is not unmapped before ``unpin``."""


def pin(memory: torch.Tensor) -> None:
    """Register host memory with CUDA until ``unpin``, if this process has a GPU.

    A GPU copies registered memory at its link's rate, other memory at a quarter or less (docs/benchmarks/gpu.md). If
    registration is refused (``ulimit -l``), copies are only slower.
    """
    if not torch.cuda.is_initialized():
        return
    refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if not refused:
        _pinned[memory.data_ptr()] = memory
        return
    log.warning("host memory cannot be registered with CUDA (error %d): copies are slower", refused)
    with suppress(RuntimeError):  # clear the error, which CUDA would report at the next launch
        torch.zeros(1, device="cuda")


def unpin(addresses: Iterable[int] | None = None) -> None:
    """Unregister the memory at these addresses that ``pin`` registered; None: all of it."""
    for address in list(_pinned if addresses is None else addresses):
        memory = _pinned.pop(address, None)  # stays mapped until unregistered
        if memory is None:
            continue
        if refused := int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):  # type: ignore[no-untyped-call]
            log.warning("host memory cannot be unregistered with CUDA (error %d)", refused)


def host_memory(nbytes: int) -> torch.Tensor:
    """Allocate whole pages of host memory (uint8), registered with CUDA until ``unpin``."""
    memory = torch.frombuffer(anonymous_map(nbytes), dtype=torch.uint8)
    pin(memory)
    return memory


def anonymous_map(nbytes: int) -> mmap.mmap:
    """Map whole pages of private memory, as huge pages where the system has them: the first write to small pages costs
    several times the copy."""
    mapped = mmap.mmap(-1, whole_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask for huge pages in the part of host memory that consists of them; do nothing for memory of a GPU."""
    start = memory.data_ptr() + -memory.data_ptr() % HUGE_PAGE
    end = memory.data_ptr() + memory.nbytes
    if memory.device.type == "cpu" and end - start >= HUGE_PAGE:
        length = (end - start) // HUGE_PAGE * HUGE_PAGE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)  # a refusal changes nothing


_madvise = ctypes.CDLL(None).madvise


def whole_pages(nbytes: int) -> int:
    """Return the number of bytes, rounded up to pages."""
    return nbytes + -nbytes % mmap.ALLOCATIONGRANULARITY
