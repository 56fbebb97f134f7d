"""Memory of a sender's buckets shared with processes on the same machine: a file in host memory, or GPU memory.

In both cases the sender makes a bucket and its name: a few bytes with which another process opens it.
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
"""Memory of this process registered with CUDA, kept referenced so that it is not unmapped before ``unpin``."""


def pin(memory: torch.Tensor) -> None:
    """Register host memory with CUDA until ``unpin``, if this process has a GPU.

    A GPU copies registered memory at its link's rate, other memory at a quarter or less (docs/benchmarks/gpu.md). If
    registration is refused (``ulimit -l``), copies are only slower.
    """
    if not torch.cuda.is_initialized():
        return
    refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if not refused:
        _pinned.append(memory)
        return
    log.warning("buckets of the weight sync cannot be registered with CUDA (error %d): copies are slower", refused)
    with suppress(RuntimeError):  # clear the error, which CUDA would report at the next launch
        torch.zeros(1, device="cuda")


def unpin() -> None:
    """Unregister all memory registered by ``pin``."""
    while _pinned:
        memory = _pinned.pop()  # stays mapped until unregistered
        if refused := int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):  # type: ignore[no-untyped-call]
            log.warning("a bucket of the weight sync cannot be unregistered with CUDA (error %d)", refused)


class MemoryFile(NamedTuple):
    """Address by which a process on the same machine opens a memory file."""

    pid: int
    descriptor: int


def memory_file() -> MemoryFile:
    """Create an empty memory file."""
    return MemoryFile(os.getpid(), os.memfd_create("megarl-weights"))


class BucketMemory(Protocol):
    """One process's access to buckets: a sender makes them, a receiver opens them."""

    name_bytes: int
    """Length of a bucket's name."""

    def make(self, nbytes: int) -> torch.Tensor:
        """Make a bucket (uint8)."""
        ...

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        """Return the fixed name for destination rank ``rank`` of a bucket, or of a bucket's beginning, made here."""
        ...

    def open(self, rank: int, name: bytes, nbytes: int) -> torch.Tensor:
        """Open the bucket with this name of source rank ``rank``, or at least its first ``nbytes``."""
        ...

    def settle(self) -> None:
        """Wait for this process's copies to and from buckets."""
        ...

    def close(self) -> None:
        """Release all buckets, also after a failed sync."""
        ...


class HostMemory:
    """Buckets in an anonymous memory file (``memfd``): it has no name, so that no file is left behind at any end of the
    processes. Another process opens it through ``/proc``.

    It is host memory for any default device of torch; slices are copied to and from a GPU while packed and unpacked.
    Both sides register the buckets with CUDA, for copies at the link's rate (not measured yet).

    Args:
        own: The sender's file.
        others: Source rank -> its file, for a receiver.
    """

    name_bytes = 8

    def __init__(self, own: MemoryFile | None = None, others: Mapping[int, MemoryFile] | None = None) -> None:
        self._own, self._others = own, others or {}
        self._offsets: dict[int, int] = {}
        """Address of a bucket -> its offset in the file."""

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
        """Do nothing: copies to and from host memory are synchronous."""

    def close(self) -> None:
        """Replace the file by an empty one and unmap the old, whose memory is freed after its last mapping. Truncating
        it would kill a hung receiver with SIGBUS when it resumes reading."""
        unpin()
        self._offsets.clear()
        if self._own is not None:
            fresh = os.memfd_create("megarl-weights")
            os.dup2(fresh, self._own.descriptor, inheritable=False)
            os.close(fresh)


class DeviceMemory:
    """Buckets in the memory of this process's GPU, which another process opens by CUDA IPC, from its own GPU or the
    same one. Never run on hardware.

    torch keeps a bucket's memory until every process with its name has released it.
    """

    name_bytes = 1024

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], bytes] = {}
        """Cache of CUDA IPC handles by (bucket address, destination rank). torch counts references to them."""

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
    """Encode a CUDA IPC handle of torch (bytes, integers and a bool) as text."""
    return json.dumps([{"hex": part.hex()} if isinstance(part, bytes) else part for part in handle]).encode()


def decoded(text: bytes) -> list[Any]:
    """Decode a handle of ``encoded``; trailing spaces are allowed."""
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in json.loads(text)]
