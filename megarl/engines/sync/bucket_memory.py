"""Memory of a sender's buckets that processes on the same machine open: a file in host memory, or a GPU's memory.

Both are used alike: the sender makes a bucket and its name, a few bytes with which another process opens it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from megarl.weights.reshard.execute import memory_for

log = logging.getLogger(__name__)


_pinned: list[torch.Tensor] = []
"""Memory that is registered with CUDA, of this process's sync. Held here: it must not be unmapped before ``unpin``."""


def pin(memory: torch.Tensor) -> None:
    """Register host memory with CUDA until ``unpin``, where this process has a GPU.

    A GPU copies to and from registered memory at the rate of its link, and from any other at a quarter or less
    (docs/benchmarks/gpu.md). Where it is refused (``ulimit -l``), copies are slower and nothing else changes.
    """
    if not torch.cuda.is_initialized():
        return
    refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if not refused:
        _pinned.append(memory)
        return
    log.warning("buckets of the weight sync cannot be registered with CUDA (error %d): copies are slower", refused)
    with suppress(RuntimeError):  # CUDA would report the error at the next launch
        torch.zeros(1, device="cuda")


def unpin() -> None:
    """Let go of all memory that ``pin`` registered."""
    while _pinned:
        memory = _pinned.pop()  # mapped until it has been unregistered
        if refused := int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):  # type: ignore[no-untyped-call]
            log.warning("a bucket of the weight sync cannot be unregistered with CUDA (error %d)", refused)


class MemoryFile(NamedTuple):
    """Address by which a process on the same machine opens a memory file."""

    pid: int
    descriptor: int


def memory_file() -> MemoryFile:
    """A new one, empty."""
    return MemoryFile(os.getpid(), os.memfd_create("megarl-weights"))


class BucketMemory(Protocol):
    """One process's end of it: that of a sender, which makes buckets, or of a receiver, which opens them."""

    name_bytes: int
    """Length of a bucket's name."""

    def make(self, nbytes: int) -> torch.Tensor:
        """A new bucket (uint8)."""
        ...

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        """Name for destination rank ``rank`` of a bucket that this end has made, or of the beginning of one; always the
        same."""
        ...

    def open(self, rank: int, name: bytes, nbytes: int) -> torch.Tensor:
        """The bucket that source rank ``rank`` has named so, or so many bytes of it at least."""
        ...

    def settle(self) -> None:
        """Return when this process's copies to and from buckets are done."""
        ...

    def close(self) -> None:
        """Let go of all buckets, also of those of a sync that failed."""
        ...


class HostMemory:
    """Buckets in an anonymous memory file (``memfd``): it has no name, so that nothing is left behind however the
    processes end. Another process opens it through ``/proc``.

    All of it is host memory, whatever torch's default device is within an engine's worker: to and from a GPU slices are
    copied as they are packed and unpacked. Both sides register the buckets with CUDA, so that this can go at the link's
    rate (not measured yet).

    Args:
        own: The sender's file.
        others: Source rank -> its file, for a receiver.
    """

    name_bytes = 8

    def __init__(self, own: MemoryFile | None = None, others: Mapping[int, MemoryFile] | None = None) -> None:
        self._own, self._others = own, others or {}
        self._offsets: dict[int, int] = {}
        """Address of a bucket -> where it lies in the file."""

    def make(self, nbytes: int) -> torch.Tensor:
        assert self._own is not None, "engine workers only receive"
        start = os.fstat(self._own.descriptor).st_size
        size = nbytes + -nbytes % mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._own.descriptor, start + size)
        bucket = torch.frombuffer(mmap.mmap(self._own.descriptor, size, offset=start), dtype=torch.uint8)
        pin(bucket)
        self._offsets[bucket.data_ptr()] = start
        return bucket[:nbytes]

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        return self._offsets[bucket.data_ptr()].to_bytes(self.name_bytes, "little")

    def open(self, rank: int, name: bytes, nbytes: int) -> torch.Tensor:
        pid, descriptor = self._others[rank]
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            with memory_for(nbytes):
                mapped = mmap.mmap(opened, nbytes, offset=int.from_bytes(name, "little"))
        finally:
            os.close(opened)
        bucket = torch.frombuffer(mapped, dtype=torch.uint8)
        pin(bucket)
        return bucket

    def settle(self) -> None:
        """Copies to and from host memory wait for themselves."""

    def close(self) -> None:
        """Put another, empty file in the file's place and let go of what this process has of the old, whose memory is
        free once nobody maps it any more: were it truncated, a receiver that was given up while it hung would die of
        SIGBUS when it reads on."""
        unpin()
        self._offsets.clear()
        if self._own is not None:
            fresh = os.memfd_create("megarl-weights")
            os.dup2(fresh, self._own.descriptor, inheritable=False)
            os.close(fresh)


class DeviceMemory:
    """Buckets in the memory of this process's GPU, which another process opens by CUDA IPC, from its own GPU or the
    same one. Never run on hardware.

    torch keeps a bucket's memory until every process that was given a name has let go of it.
    """

    name_bytes = 1024

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], bytes] = {}
        """(address of a bucket, destination rank) -> its name there: torch counts who has one."""

    def make(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        key = bucket.data_ptr(), rank
        if key not in self._names:
            _, *handle = bucket.untyped_storage()._share_cuda_()
            self._names[key] = encoded(handle).ljust(self.name_bytes)
        return self._names[key]

    def open(self, rank: int, name: bytes, nbytes: int) -> torch.Tensor:
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *decoded(name))
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._names.clear()
        torch.cuda.ipc_collect()


def encoded(handle: list[Any]) -> bytes:
    """Text of a CUDA IPC handle as torch has it: bytes, integers and a bool."""
    return json.dumps([{"hex": part.hex()} if isinstance(part, bytes) else part for part in handle]).encode()


def decoded(text: bytes) -> list[Any]:
    """Handle that ``encoded`` has written, with spaces after it or without."""
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in json.loads(text)]
