"""Weights for an engine worker on the trainer rank's own machine: in shared buckets instead of a socket.

A receiver on the same machine opens the sender's two buckets (``bucket_memory.py``) and unpacks from them, so it needs
no buckets. The socket transports only "written" and "read", in the order of the messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.engines.sync.bucket_memory import BucketMemory, KeptBuckets, MemoryFile
from megarl.ops.host_memory import host_memory
from megarl.weights.reshard.execute import Arrival, Transport, Work


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
