"""A process beside this one that does its writing, from copies of tensors in memory that both share."""

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
from megarl.core.processes.parent import die_with

T = TypeVar("T")
NICENESS = 10
"""The writer has until the next checkpoint, the trainer waits for nobody."""
SEND_S = 60.0
"""Seconds that the writer may take to read a request; one that takes longer is killed."""
KILLED_S = 10.0
"""Seconds for which a killed writer is waited for: one that the kernel holds, in the middle of a write, ends later."""
ALIGNMENT = 64
"""Bytes between the beginnings of tensors."""


class _Place(NamedTuple):
    """Place of one tensor in the shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: mmap.mmap | None) -> torch.Tensor:
        """The tensor there, with a storage of its own size: a pickler writes whole storages."""
        count = prod(self.shape) * self.dtype.itemsize
        if memory is None or not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return (
            torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=self.start)
            .view(self.dtype)
            .view(self.shape)
        )


class PendingWrite(Generic[T]):
    """Work that the ``Writer`` has begun, and its result."""

    def __init__(self, writer: Writer, failed: RuntimeError | None = None) -> None:
        self._writer, self._failed = writer, failed

    @property
    def done(self) -> bool:
        """True if ``result`` will not wait."""
        return self._failed is not None or self._writer.answered

    def result(self) -> T:
        """Return the result of the work; waits for it.

        Raises:
            OSError, RuntimeError: what the work raised, or that the writer died or had no memory.
        """
        if self._failed is not None:
            raise self._failed
        found: T = self._writer.answer()
        return found

    def kill(self) -> None:
        """End the writer in the middle of it."""
        self._writer.kill()


class Writer:
    """A child that does one piece of work after the other, and dies with this process.

    It is forked once, best before models take memory and a GPU: a page of a forked child is copied when its parent
    writes to it, and training writes to every one. What it is to work on is copied into shared memory, which stays and
    is used again: its pages are made only once. So that memory holds one more copy of the largest snapshot for as long
    as this process lives.

    The child has no files and sockets of its parent's, so none that the parent closes stays open, and ignores the
    signals that ask a job to end, since its parent then waits for it.
    """

    def __init__(self) -> None:
        self._busy = False
        self._descriptor = os.memfd_create("megarl-checkpoint")
        self._memory: mmap.mmap | None = None
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, self._descriptor, os.getpid()), daemon=True)
        """The process that writes."""
        self.process.start()
        other.close()
        atexit.register(self.kill)  # multiprocessing's own end is the signal that it ignores

    @property
    def alive(self) -> bool:
        """True while the child lives."""
        return self.process.is_alive()

    def begin(self, work: Callable[..., T], tensors: Sequence[torch.Tensor], *rest: Any) -> PendingWrite[T]:
        """Let the child do ``work(tensors, *rest)`` with the tensors as they are now, on the CPU; all but them is
        pickled.

        ``work`` must touch no GPU and no process group. Where the child cannot begin, the task raises it.
        """
        assert not self._busy, "the one before it has not been asked for its result"
        places, start = [], 0
        for tensor in tensors:
            places.append(_Place(start, tuple(tensor.shape), tensor.dtype))
            start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        try:
            self._grow(start)
        except OSError as error:
            return PendingWrite(
                self, RuntimeError(f"no memory for a copy of {start:,} bytes to write it from ({error.strerror})")
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
        """Memory for ``size`` bytes. Raises OSError where there is none: better here than by a signal when a page is
        used."""
        if size > (0 if self._memory is None else len(self._memory)):
            os.posix_fallocate(self._descriptor, 0, size)
            self._memory = mmap.mmap(self._descriptor, size)

    @property
    def answered(self) -> bool:
        """True if there is an answer, or will never be one."""
        return self._pipe.poll() or not self.alive

    def answer(self) -> Any:
        """Return the result of the child's work, or raise its error. Raises RuntimeError where it died."""
        self._busy = False
        written = self._written()
        while not self._pipe.poll(1.0) and self.alive:
            before, written = written, self._written()
            if written != before:
                heartbeat.beat()  # it writes; one that does not is a stall
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
        """Changes while the process writes."""
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
    """This process's writer, which is started where there is none alive."""
    global _writer
    if _writer is not None and not _writer.alive:
        _writer.kill()  # or its end at exit would keep it, and a whole snapshot of memory with it
        _writer = None
    if _writer is None:
        _writer = Writer()
    return _writer


def _forget() -> None:
    global _writer
    _writer = None


os.register_at_fork(after_in_child=_forget)  # it is the parent's


def _serve(pipe: Connection, descriptor: int, parent: int) -> None:
    """The child's life."""
    gc.freeze()  # what belongs to the parent, on a GPU too, is not this process's to free
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
