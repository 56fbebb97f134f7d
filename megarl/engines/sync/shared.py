"""Weights for an engine worker on the trainer rank's own machine: in shared buckets instead of a socket.

The buckets' memory is a file in host memory, or GPU memory. In both cases the sender makes a bucket and its name: a few
bytes with which another process opens it.

A receiver on the same machine opens the sender's two buckets and unpacks from them, so it needs no buckets. The socket
transports only "written" and "read", in the order of the messages.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megarl.ops.host_memory import host_memory, pin, unpin, whole_pages
from megarl.weights.reshard.execute import Arrival, Transport, Work, memory_for


class KeptBuckets:
    """Buckets that stay after a sync for the next one, with their maps and registrations.

    The first write to new host memory costs a page fault for each page, 2 to 9 times the copy itself.

    Args:
        make: Returns new memory (uint8) of at least a number of bytes.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._free: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of the smallest free bucket that has them, or of a new bucket."""
        enough = [i for i, bucket in enumerate(self._free) if bucket.numel() >= nbytes]
        found = min(enough, key=lambda i: self._free[i].numel(), default=None)
        bucket = self._make(nbytes) if found is None else self._free.pop(found)
        self._taken.append(bucket)
        return bucket[:nbytes]

    def rest(self) -> None:
        """End a sync: all taken buckets are free for the next one."""
        self._free += self._taken
        self._taken.clear()

    def drop(self) -> None:
        """Release all buckets and unregister them."""
        unpin(bucket.data_ptr() for bucket in (*self._free, *self._taken))
        self._free.clear()
        self._taken.clear()


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
        """Return a bucket (uint8): a kept one that is large enough, or a new one."""
        ...

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        """Return the fixed name for destination rank ``rank`` of a bucket, or of a bucket's beginning, made here."""
        ...

    def open(self, rank: int, name: bytes) -> torch.Tensor:
        """Open the bucket with this name of source rank ``rank``, or return it if it is open."""
        ...

    def settle(self) -> None:
        """Wait for this process's copies to and from buckets."""
        ...

    def rest(self) -> None:
        """End a sync that every receiver has read: keep the buckets, and what is open of them, for the next sync."""
        ...

    def close(self) -> None:
        """Release all buckets, also after a failed sync."""
        ...


_generations = itertools.count()
"""Numbers of the memory files that this process has filled: names of buckets in two files never coincide."""


class HostMemory:
    """Buckets in an anonymous memory file (``memfd``): it has no name, so that no file is left behind at any end of the
    processes. Another process opens it through ``/proc``.

    It is host memory for any default device of torch; slices are copied to and from a GPU while packed and unpacked.
    Both sides register the buckets with CUDA, for copies at the link's rate.

    Args:
        own: The sender's file.
        others: Source rank -> its file, for a receiver.
    """

    _name = struct.Struct("<QQQ")
    """Generation of the file, offset and bytes of a bucket."""
    name_bytes = _name.size

    def __init__(self, own: MemoryFile | None = None, others: Mapping[int, MemoryFile] | None = None) -> None:
        self._own, self._others = own, others or {}
        self._buckets = KeptBuckets(self._new)
        self._names: dict[int, bytes] = {}
        """Address of a bucket -> its name."""
        self._opened: dict[int, dict[bytes, torch.Tensor]] = {}
        """Source rank -> its buckets by name, of its file's last generation."""
        self._generation = next(_generations)

    def make(self, nbytes: int) -> torch.Tensor:
        return self._buckets.take(nbytes)

    def _new(self, nbytes: int) -> torch.Tensor:
        assert self._own is not None, "engine workers only receive"
        start, size = os.fstat(self._own.descriptor).st_size, whole_pages(nbytes)
        os.ftruncate(self._own.descriptor, start + size)
        bucket = torch.frombuffer(mmap.mmap(self._own.descriptor, size, offset=start), dtype=torch.uint8)
        pin(bucket)
        self._names[bucket.data_ptr()] = self._name.pack(self._generation, start, size)
        return bucket

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        return self._names[bucket.data_ptr()]

    def open(self, rank: int, name: bytes) -> torch.Tensor:
        generation, offset, size = self._name.unpack(name)
        known = self._opened.setdefault(rank, {})
        if known and self._name.unpack(next(iter(known)))[0] != generation:
            self._close(rank)  # the sender has another file
        if name not in known:
            known[name] = self._map(self._others[rank], offset, size)
        return known[name]

    @staticmethod
    def _map(file: MemoryFile, offset: int, size: int) -> torch.Tensor:
        opened = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDWR)
        try:
            with memory_for(size):
                bucket = torch.frombuffer(mmap.mmap(opened, size, offset=offset), dtype=torch.uint8)
        finally:
            os.close(opened)
        pin(bucket)
        return bucket

    def settle(self) -> None:
        """Do nothing: copies to and from host memory are synchronous."""

    def rest(self) -> None:
        self._buckets.rest()

    def _close(self, rank: int) -> None:
        opened = self._opened[rank]
        unpin(bucket.data_ptr() for bucket in opened.values())
        opened.clear()

    def close(self) -> None:
        """Replace the file by an empty one and unmap the old, whose memory is freed after its last mapping. Truncating
        it would kill a hung receiver with SIGBUS when it resumes reading."""
        self._buckets.drop()
        self._names.clear()
        for rank in self._opened:
            self._close(rank)
        if self._own is not None:
            self._generation = next(_generations)
            fresh = os.memfd_create("megarl-weights")
            os.dup2(fresh, self._own.descriptor, inheritable=False)
            os.close(fresh)


class DeviceMemory:
    """Buckets in the memory of this process's GPU, which another process opens by CUDA IPC, from its own GPU or the
    same one. Never run on hardware.

    torch keeps a bucket's memory until every process with its name has released it.

    Args:
        keeps: Keep buckets and handles after a sync. A GPU that trainer and engine take in turns needs the memory.
    """

    name_bytes = 1024

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._buckets = KeptBuckets(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        self._names: dict[tuple[int, int], bytes] = {}
        """CUDA IPC handles by (bucket address, destination rank). torch counts references to them."""
        self._opened: dict[tuple[int, bytes], torch.Tensor] = {}

    def make(self, nbytes: int) -> torch.Tensor:
        return self._buckets.take(nbytes)

    def name(self, bucket: torch.Tensor, rank: int) -> bytes:
        key = bucket.data_ptr(), rank
        if key not in self._names:
            _, *handle = bucket.untyped_storage()._share_cuda_()
            self._names[key] = encoded(handle).ljust(self.name_bytes)
        return self._names[key]

    def open(self, rank: int, name: bytes) -> torch.Tensor:
        if (rank, name) not in self._opened:
            storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *decoded(name))
            bucket = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
            self._opened[rank, name] = bucket
        return self._opened[rank, name]

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def rest(self) -> None:
        self._buckets.rest()
        if not self._keeps:
            self.close()

    def close(self) -> None:
        self._buckets.drop()
        self._names.clear()
        self._opened.clear()
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


def _far_bucket(far: Transport, nbytes: int) -> torch.Tensor:
    """Make a bucket for messages over ``far``; host memory is registered with CUDA."""
    return host_memory(nbytes) if far.allocate(0).device.type == "cpu" else far.allocate(nbytes)


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
        self._far_buckets = KeptBuckets(partial(_far_bucket, self._far))
        memory.close()

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        if not self._same_machine or nbytes == 0:
            return self._far_buckets.take(nbytes)
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
        """End a sync whose buckets every receiver has read; they are kept for the next sync."""
        self._memory.rest()
        self._far_buckets.rest()

    def close(self) -> None:
        """Release the buckets' memory, after receivers have read it or were given up."""
        self._memory.close()
        self._far_buckets.drop()


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
        self._far_buckets = KeptBuckets(partial(_far_bucket, self._far))
        self._answers: list[tuple[Work, torch.Tensor]] = []
        memory.close()

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return self._far_buckets.take(nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        raise AssertionError("engine workers only receive")

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        if rank not in self._same_machine:
            return self._far.irecv(nbytes, rank, spare)
        name = torch.empty(self._memory.name_bytes, dtype=torch.uint8, device="cpu")
        return _Borrowed(self, rank, nbytes, self._link.irecv(name.nbytes, rank, lambda: name))

    def finish(self) -> None:
        """End a sync; the senders' buckets stay open for the next one."""
        for work, _ in self._answers:
            work.wait()
        self._answers.clear()
        self._memory.rest()
        self._far_buckets.rest()

    def close(self) -> None:
        """Release the senders' memory and this side's."""
        self._answers.clear()
        self._memory.close()
        self._far_buckets.drop()

    def read(self, rank: int, name: bytes, nbytes: int) -> torch.Tensor:
        return self._memory.open(rank, name)[:nbytes]

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
