"""A child process that writes for this one, from copies of tensors in shared memory."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import mmap
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from megarl.core.processes import heartbeat
from megarl.core.processes.machine import die_with

T = TypeVar("T")
NICENESS = 10
"""Low priority: the writer has time until the next checkpoint, and no process waits for it."""
SEND_S = 60.0
"""Timeout in seconds for the writer to read a request; then it is killed."""
KILLED_S = 10.0
"""Seconds to wait for a killed writer; in the middle of a write the kernel may delay its end."""
ALIGNMENT = 64
"""Alignment of tensors in bytes."""


class MemoryPlace(NamedTuple):
    """Location of one tensor in shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: mmap.mmap | None) -> torch.Tensor:
        """The tensor in ``memory``, with a storage of exactly its size, because a pickler writes whole storages."""
        count = prod(self.shape) * self.dtype.itemsize
        if memory is None or not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return (
            torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=self.start)
            .view(self.dtype)
            .view(self.shape)
        )


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[MemoryPlace], int]:
    """Return the places of tensors, one after the other, and their bytes together."""
    places, start = list[MemoryPlace](), 0
    for tensor in tensors:
        places.append(MemoryPlace(start, tuple(tensor.shape), tensor.dtype))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, start


class PendingWrite(Generic[T]):
    """Work in progress in the ``Writer``, and its result."""

    def __init__(self, writer: Writer, failed: RuntimeError | None = None) -> None:
        self._writer, self._failed = writer, failed

    @property
    def done(self) -> bool:
        """True if ``result`` would not block."""
        return self._failed is not None or self._writer.answered

    def result(self) -> T:
        """Wait for the work and return its result.

        Raises:
            OSError, RuntimeError: raised by the work, or the writer died or had no memory.
        """
        if self._failed is not None:
            raise self._failed
        found: T = self._writer.answer()
        return found

    def kill(self) -> None:
        """Kill the writer during its work."""
        self._writer.kill()


class Writer:
    """A child that does one piece of work at a time and dies with this process.

    It is forked once, best before models take memory and a GPU: training writes to every page, which would copy the
    pages of a later fork. Tensors are copied into shared memory, which is reused, so pages are allocated once. Until
    this process ends it uses memory for one copy of the largest snapshot.

    The child closes its parent's files and sockets, so that none stays open. It ignores signals that end a job, because
    its parent then waits for it.
    """

    def __init__(self) -> None:
        self._busy = False
        self._descriptor = os.memfd_create("megarl-checkpoint")
        self._memory: mmap.mmap | None = None
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, self._descriptor, os.getpid()), daemon=True)
        """The child."""
        self.process.start()
        other.close()
        atexit.register(self.kill)  # multiprocessing would end it by a signal that it ignores

    @property
    def alive(self) -> bool:
        """True while the child runs."""
        return self.process.is_alive()

    def begin(self, work: Callable[..., T], tensors: Sequence[torch.Tensor], *rest: Any) -> PendingWrite[T]:
        """Start ``work(tensors, *rest)`` in the child, on CPU copies of the tensors; pickle ``work`` and ``rest``.

        ``work`` must not use a GPU or process group. If the child cannot start, the returned task raises the error.
        """
        assert not self._busy, "the one before it has not been asked for its result"
        places, size = places_of(tensors)
        try:
            self._grow(size)
        except OSError as error:
            return PendingWrite(
                self, RuntimeError(f"no memory for a copy of {size:,} bytes to write it from ({error.strerror})")
            )
        for place, tensor in zip(places, tensors, strict=True):
            place.within(self._memory).copy_(tensor)
        late = threading.Timer(SEND_S, self.process.kill)
        late.start()
        try:
            self._pipe.send((work, rest, places))
        except OSError:
            return PendingWrite(self, RuntimeError(self._death()))
        finally:
            late.cancel()
        self._busy = True
        return PendingWrite(self)

    def _grow(self, size: int) -> None:
        """Grow the shared memory to ``size`` bytes. Raises OSError if memory is full: a page access would kill us."""
        if size > (0 if self._memory is None else len(self._memory)):
            os.posix_fallocate(self._descriptor, 0, size)
            self._memory = mmap.mmap(self._descriptor, size)

    @property
    def answered(self) -> bool:
        """True if the answer has arrived or never will."""
        return self._pipe.poll() or not self.alive

    def answer(self) -> Any:
        """Return the result of the child's work, or raise its error. Raises RuntimeError if the child died."""
        self._busy = False
        written = self._written()
        while not self._pipe.poll(1.0) and self.alive:
            before, written = written, self._written()
            if written != before:
                heartbeat.beat()  # it writes; without progress it is a stall
        try:
            result, error = self._pipe.recv()
        except (EOFError, OSError) as closed:
            raise RuntimeError(self._death()) from closed
        if error is not None:
            raise error
        return result

    def _death(self) -> str:
        self.process.join(KILLED_S)
        return f"the process that writes it ended with status {self.process.exitcode}"

    def _written(self) -> str:
        """I/O counters of the child, which change while it writes."""
        try:
            return Path(f"/proc/{self.process.pid}/io").read_text()
        except OSError:
            return ""

    def kill(self) -> None:
        """Kill the child and wait for its end."""
        atexit.unregister(self.kill)
        self.process.kill()
        self.process.join(KILLED_S)

    def __del__(self) -> None:
        os.close(self._descriptor)


_writer: Writer | None = None


def of_process() -> Writer:
    """Return this process's writer; start one if none is running."""
    global _writer
    if _writer is not None and not _writer.alive:
        _writer.kill()  # or its atexit handler would keep it and a whole snapshot in memory
        _writer = None
    if _writer is None:
        _writer = Writer()
    return _writer


def _forget() -> None:
    global _writer
    _writer = None


os.register_at_fork(after_in_child=_forget)  # the writer belongs to the parent


def _serve(pipe: Connection, descriptor: int, parent: int) -> None:
    """Main loop of the child."""
    gc.freeze()  # objects of the parent, also on a GPU, must not be freed here
    faulthandler.unregister(heartbeat.ASK)
    for number in (signal.SIGTERM, signal.SIGINT, heartbeat.ASK):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent, signal.SIGKILL)
    os.nice(NICENESS)
    kept = sorted({0, 1, 2, pipe.fileno(), descriptor})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    memory: mmap.mmap | None = None
    while True:
        try:
            work, rest, places = pipe.recv()
        except EOFError:
            os._exit(0)
        size = os.fstat(descriptor).st_size
        if size > (0 if memory is None else len(memory)):
            memory = mmap.mmap(descriptor, size)
        try:
            answer: tuple[Any, Exception | None] = work([place.within(memory) for place in places], *rest), None
        except (OSError, RuntimeError) as error:
            answer = None, error
        pipe.send(answer)
