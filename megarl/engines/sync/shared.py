"""Weights for an engine worker on the trainer rank's own machine: memory of buckets, shared between processes.

In both cases the sender makes a bucket and its name: a few bytes with which another process opens it.

A receiver on the same machine opens the sender's two buckets (``shared.py``) and unpacks from them, so it needs
no buckets. The socket transports only "written" and "read", in the order of the messages.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megarl.weights.reshard.execute import Arrival, Transport, Work, memory_for

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


def machine() -> str:
    """Return an id that is equal for two processes exactly if they can share memory: same boot, same /proc, same user.

    ``MEGARL_NODE`` overrides it, so that tests can have several nodes on one machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get("MEGARL_NODE") or f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


@dataclass(frozen=True)
class Places:
    """Machines of all processes; empty if none share memory. Plain values, for JSON."""

    workers: Sequence[str] = ()
    """Machine of each engine worker, by destination rank."""
    senders: Sequence[Sequence[Any]] = ()
    """(machine, process, descriptor of its memory file) of each trainer rank."""

    def of_workers(self, first: int, count: int) -> Places:
        """Return the places of a job with only these workers; still empty if none share memory."""
        return Places(self.workers[first : first + count], self.senders)

    def workers_on_same_machine(self, trainer: int) -> frozenset[int]:
        """Destination ranks that read this trainer rank's memory."""
        return frozenset(rank for rank, where in enumerate(self.workers) if where == self.senders[trainer][0])

    def senders_on_same_machine(self, worker: int) -> dict[int, MemoryFile]:
        """Return trainer rank -> memory file, for ranks on this destination rank's machine."""
        return {
            rank: MemoryFile(pid, descriptor)
            for rank, (where, pid, descriptor) in enumerate(self.senders)
            if where == self.workers[worker]
        }

    def nearness(self) -> Callable[[int, int], int] | None:
        """Return the nearness of ranks for ``build_plan``; None if all are equal."""
        if len({*self.workers, *(where for where, *_ in self.senders)}) < 2:
            return None
        return lambda src, dst: int(self.senders[src][0] != self.workers[dst])


class SharedMemorySender:
    """A sender's transport: through memory to the ranks in ``same_machine``, over ``far`` to all others.

    Args:
        link: Transports notices to and from ``same_machine``, in host memory.
        far: Transports the other messages; None uses ``link``.
    """

    def __init__(
        self, link: Transport, same_machine: frozenset[int], memory: BucketMemory, far: Transport | None = None
    ) -> None:
        self._link, self._far = link, far or link
        self._same_machine = same_machine
        self._memory = memory
        memory.close()

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        if not self._same_machine or nbytes == 0:
            return self._far.allocate(nbytes)
        return self._memory.make(nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        if rank not in self._same_machine:
            return self._far.isend(message, rank)
        self._memory.settle()
        name = torch.frombuffer(bytearray(self._memory.name(message, rank)), dtype=torch.uint8)
        return _Lent(self._link, rank, self._link.isend(name, rank), name)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        raise AssertionError("trainer ranks only send")

    def finish(self) -> None:
        """Free the buckets' memory, after every receiver has read it or was given up."""
        self._memory.close()


@dataclass
class _Lent:
    """A bucket that a receiver is reading."""

    link: Transport
    rank: int
    notice: Work
    name: torch.Tensor
    """Kept alive until sent."""

    def wait(self) -> None:
        self.notice.wait()
        self.link.irecv(1, self.rank, lambda: torch.empty(1, dtype=torch.uint8, device="cpu")).wait()


class SharedMemoryReceiver:
    """A receiver's transport: reads from the memory of the ranks in ``same_machine``, receives from all others over
    ``far`` (None: ``link``)."""

    def __init__(
        self, link: Transport, same_machine: Collection[int], memory: BucketMemory, far: Transport | None = None
    ) -> None:
        self._link, self._far = link, far or link
        self._same_machine = same_machine
        self._memory = memory
        self._opened: dict[tuple[int, bytes], torch.Tensor] = {}
        self._answers: list[tuple[Work, torch.Tensor]] = []
        memory.close()

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return self._far.allocate(nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        raise AssertionError("engine workers only receive")

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        if rank not in self._same_machine:
            return self._far.irecv(nbytes, rank, spare)
        name = torch.empty(self._memory.name_bytes, dtype=torch.uint8, device="cpu")
        return _Borrowed(self, rank, nbytes, self._link.irecv(name.nbytes, rank, lambda: name))

    def finish(self) -> None:
        """Release the senders' memory."""
        for work, _ in self._answers:
            work.wait()
        self._answers.clear()
        self._opened.clear()
        self._memory.close()

    def read(self, rank: int, name: bytes, nbytes: int) -> torch.Tensor:
        bucket = self._opened.get((rank, name))
        if bucket is None or bucket.numel() < nbytes:
            bucket = self._opened[rank, name] = self._memory.open(rank, name, nbytes)
        return bucket[:nbytes]

    def answer(self, rank: int) -> None:
        self._memory.settle()
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._answers.append((self._link.isend(word, rank), word))


@dataclass
class _Borrowed:
    """A bucket in its sender's memory."""

    receiver: SharedMemoryReceiver
    rank: int
    nbytes: int
    notice: Arrival

    def wait(self) -> torch.Tensor:
        name = self.notice.wait().numpy().tobytes()
        return self.receiver.read(self.rank, name, self.nbytes)

    def release(self) -> None:
        self.receiver.answer(self.rank)
