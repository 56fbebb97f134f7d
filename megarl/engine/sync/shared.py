"""Weights for an engine worker on the trainer rank's own machine: through shared memory instead of a socket.

The sender's two buckets lie in an anonymous memory file (``memfd``): it has no name, so that nothing is left behind
however the processes end. A receiver on the same machine opens it through ``/proc`` and unpacks straight from it; it
needs no bucket of its own. Only "it is there" and "it is read" travel over the socket, a few bytes each, in the order
of the messages. All of it is host memory, whatever torch's default device is within an engine's worker: to and from a
GPU slices are copied as they are packed and unpacked. Both sides register the buckets with CUDA, so that this can go at
the link's rate (not measured yet).
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.weights.reshard.execute import Arrival, Transport, Work, memory_for

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


def machine() -> str:
    """Equal for two processes exactly when they can share memory: one boot of one machine, one view of /proc, one user.

    ``MEGARL_NODE`` overrides it, so that tests can have several nodes on one machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get("MEGARL_NODE") or f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def memory_file() -> MemoryFile:
    """A new one, empty."""
    return MemoryFile(os.getpid(), os.memfd_create("megarl-weights"))


@dataclass(frozen=True)
class Places:
    """Machines of all processes; empty: nobody shares memory. Plain values: it travels as JSON."""

    workers: Sequence[str] = ()
    """Machine of each engine worker, by destination rank."""
    senders: Sequence[Sequence[Any]] = ()
    """(machine, process, descriptor of its memory file) of each trainer rank."""

    def of_workers(self, first: int, count: int) -> Places:
        """Return the places where these workers are all; where nobody shares memory, so nobody does."""
        return Places(self.workers[first : first + count], self.senders)

    def workers_on_same_machine(self, trainer: int) -> frozenset[int]:
        """Destination ranks that read this trainer rank's memory."""
        return frozenset(rank for rank, where in enumerate(self.workers) if where == self.senders[trainer][0])

    def senders_on_same_machine(self, worker: int) -> dict[int, MemoryFile]:
        """Trainer rank -> its memory file, of those whose memory this destination rank reads."""
        return {
            rank: MemoryFile(pid, descriptor)
            for rank, (where, pid, descriptor) in enumerate(self.senders)
            if where == self.workers[worker]
        }

    def nearness(self) -> Callable[[int, int], int] | None:
        """Nearness of ranks for ``build_plan``; None where all are alike."""
        if len({*self.workers, *(where for where, *_ in self.senders)}) < 2:
            return None
        return lambda src, dst: int(self.senders[src][0] != self.workers[dst])


class SharedMemorySender:
    """A sender's transport: through memory to the ranks in ``same_machine``, over ``link`` to all others."""

    def __init__(self, link: Transport, same_machine: frozenset[int], file: MemoryFile) -> None:
        self._link = link
        self._same_machine = same_machine
        self._file = file
        self._offsets: dict[int, int] = {}
        """Address of a bucket -> where it lies in the file."""
        self._renew()  # buckets of a sync that failed

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        if not self._same_machine or nbytes == 0:
            return self._link.allocate(nbytes)
        start = os.fstat(self._file.descriptor).st_size
        size = nbytes + -nbytes % mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._file.descriptor, start + size)
        bucket = torch.frombuffer(mmap.mmap(self._file.descriptor, size, offset=start), dtype=torch.uint8)
        pin(bucket)
        self._offsets[bucket.data_ptr()] = start
        return bucket[:nbytes]

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        if rank not in self._same_machine:
            return self._link.isend(message, rank)
        offset = torch.tensor([self._offsets[message.data_ptr()]], device="cpu").view(torch.uint8)
        return _Lent(self._link, rank, self._link.isend(offset, rank), offset)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        raise AssertionError("trainer ranks only send")

    def finish(self) -> None:
        """Gives the memory of the buckets back; every receiver has read what they held, or is waited for no more."""
        if self._offsets:
            self._renew()
        self._offsets.clear()

    def _renew(self) -> None:
        """Put another, empty file in the file's place and let go of what this process has of the old, whose memory is
        free once nobody maps it any more: were it truncated, a receiver that was given up while it hung would die of
        SIGBUS when it reads on."""
        unpin()
        fresh = os.memfd_create("megarl-weights")
        os.dup2(fresh, self._file.descriptor, inheritable=False)
        os.close(fresh)


@dataclass
class _Lent:
    """A bucket that a receiver is reading."""

    link: Transport
    rank: int
    notice: Work
    offset: torch.Tensor
    """Lives until it has been sent."""

    def wait(self) -> None:
        self.notice.wait()
        self.link.irecv(1, self.rank, lambda: torch.empty(1, dtype=torch.uint8, device="cpu")).wait()


class SharedMemoryReceiver:
    """A receiver's transport: reads from the memory of the ranks in ``same_machine``, receives from all others over
    ``link``."""

    def __init__(self, link: Transport, same_machine: Mapping[int, MemoryFile]) -> None:
        self._link = link
        self._same_machine = same_machine
        self._maps: dict[tuple[int, int], torch.Tensor] = {}
        self._answers: list[tuple[Work, torch.Tensor]] = []
        unpin()  # what a sync that failed left

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        raise AssertionError("engine workers only receive")

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        raise AssertionError("engine workers only receive")

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        if rank not in self._same_machine:
            return self._link.irecv(nbytes, rank, spare)
        offset = torch.empty(8, dtype=torch.uint8, device="cpu")
        return _Borrowed(self, rank, nbytes, self._link.irecv(8, rank, lambda: offset))

    def finish(self) -> None:
        """Lets go of the senders' memory."""
        for work, _ in self._answers:
            work.wait()
        self._answers.clear()
        unpin()
        self._maps.clear()

    def read(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        bucket = self._maps.get((rank, offset))
        if bucket is None or bucket.numel() < nbytes:
            pid, descriptor = self._same_machine[rank]
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
            try:
                with memory_for(nbytes):
                    mapped = mmap.mmap(opened, nbytes, offset=offset)
            finally:
                os.close(opened)
            bucket = self._maps[rank, offset] = torch.frombuffer(mapped, dtype=torch.uint8)
            pin(bucket)
        return bucket[:nbytes]

    def answer(self, rank: int) -> None:
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
        offset = int(self.notice.wait().view(torch.int64))
        return self.receiver.read(self.rank, offset, self.nbytes)

    def release(self) -> None:
        self.receiver.answer(self.rank)
