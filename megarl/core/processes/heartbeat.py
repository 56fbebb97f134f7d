"""Heartbeats: progress of a process, in a page of memory shared with its supervisor.

A process that waits in C for a peer cannot respond. So its main thread writes heartbeats here (half a µs each). On
SIGUSR2 the stacks of all threads are written after the page, even while the process is blocked. Without a supervisor
nothing happens.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

VARIABLE = "MEGARL_HEARTBEAT"
"""Environment variable with the number of the memory's descriptor, which a child inherits."""
ASK = signal.SIGUSR2
"""Signal that makes a process write its stacks here. SIGUSR1 is for people: it writes them to the log."""
PAGE = 4096
"""Bytes in front of the stacks."""
START = "start"
"""Phase of a process until it begins its work: imports, models, connections."""
_MEMORY = "megarl-heartbeat"
_RECORD = struct.Struct("<QQQqd80s")
_CHECK = struct.Struct("<I")
_SLOT = 256
"""Offset in bytes of odd records from even ones."""


class Heartbeat(NamedTuple):
    """The last heartbeat of a process."""

    thread: int = 0
    """Id of its main thread, as in its stacks."""
    beats: int = 0
    """Number of heartbeats so far; a count that stays the same for long is a stall."""
    work: int = 0
    """Count of an explorer's work: finished and scored answers, engine heartbeats with new tokens, seconds of workflows
    within their limits, waits for the store. An idle explorer still sends heartbeats."""
    step: int = 0
    """Step of the loop, from 1; 0 outside of steps."""
    timeout_s: float = 0.0
    """Seconds that the phase may be silent, if more than usual."""
    phase: str = START


def _record(slot: bytes) -> Heartbeat | None:
    """Unpack a record; ``None`` if the writer is in the middle of it."""
    if not any(slot):
        return Heartbeat()
    if _CHECK.unpack_from(slot, _RECORD.size)[0] != zlib.crc32(slot[: _RECORD.size]):
        return None
    thread, beats, work, step, timeout_s, phase = _RECORD.unpack_from(slot)
    return Heartbeat(thread, beats, work, step, timeout_s, phase.rstrip(b"\0").decode(errors="replace"))


class Memory:
    """Supervisor's side. Pass ``descriptor`` to the child, with its number in ``VARIABLE``."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Open the memory of a process that another one watches. Raises OSError, or KeyError if it has none."""
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(line.partition(b"=")[::2] for line in file.read().split(b"\0"))
        number = variables[VARIABLE.encode()].decode()
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        found = cls.__new__(cls)
        found.descriptor = descriptor
        return found

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_MEMORY)
        os.ftruncate(self.descriptor, PAGE)
        os.lseek(self.descriptor, PAGE, os.SEEK_SET)  # the child shares the position: stacks are appended

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read(self) -> Heartbeat:
        """Return the newest complete record; a record of phase ``START`` if none exists."""
        for _ in range(1000):
            raw = os.pread(self.descriptor, 2 * _SLOT, 0)
            found = [_record(raw[place : place + _SLOT]) for place in (0, _SLOT)]
            # The writer may have been stopped within one record. Both are torn only if it writes faster than we read.
            if whole := [record for record in found if record is not None]:
                return max(whole, key=lambda record: record.beats)
        return Heartbeat()

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def stacks(self, start: int) -> str:
        """Return the stacks written after ``start``, an earlier ``size``."""
        return os.pread(self.descriptor, self.size() - start, start).decode(errors="replace")


class _Own:
    """This process's side."""

    def __init__(self, descriptor: int) -> None:
        self.map = mmap.mmap(descriptor, PAGE)
        self.thread = threading.main_thread().ident or 0
        self.count = self.work = self.step = 0
        self.timeout_s = 0.0
        self.phase = START.encode()

    def beat(self) -> None:
        if threading.get_ident() != self.thread:  # heartbeats measure the main thread only
            return
        self.count += 1
        body = _RECORD.pack(self.thread, self.count, self.work, self.step, self.timeout_s, self.phase)
        # The previous record stays intact; a checksum shows readers which of the two is complete.
        start = self.count % 2 * _SLOT
        self.map[start : start + len(body) + _CHECK.size] = body + _CHECK.pack(zlib.crc32(body))


_own: _Own | None = None


def begin() -> None:
    """Connect this process to its supervisor if that set ``VARIABLE``. Always write its stacks to stderr on SIGUSR1."""
    global _own
    faulthandler.register(signal.SIGUSR1)
    if (descriptor := listen()) is not None:
        _own = _Own(descriptor)
        _own.beat()


def listen() -> int | None:
    """Write stacks on request, without heartbeats. Return the memory's descriptor, ``None`` without a supervisor."""
    number = os.environ.get(VARIABLE, "")
    try:
        known = _MEMORY in os.readlink(
            f"/proc/self/fd/{int(number)}"
        )  # in a grandchild the number may be another file's
    except (OSError, ValueError):
        return None
    if not known:
        return None
    faulthandler.register(ASK, file=int(number), all_threads=True)
    return int(number)


def _forget() -> None:
    global _own
    _own = None


os.register_at_fork(after_in_child=_forget)  # the page belongs to the parent


def beat() -> None:
    """Record progress: a micro-batch, a tensor, or a round of waiting for healthy peers."""
    if _own is not None:
        _own.beat()


def count_work() -> None:
    """Record work: a sample has ended or was scored, or engines have generated more tokens of one."""
    if _own is not None:
        _own.work += 1


def count_wait() -> None:
    """Record that a bounded wait for an unreachable database goes on: neither a stall nor an idle explorer."""
    count_work()
    beat()


def set_phase(phase: str) -> None:
    """Set the phase that holds outside all ``phase`` blocks; ends ``START``."""
    if _own is not None:
        _own.phase = phase.encode()[:80]
        _own.beat()


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Set the phase in the body (``step`` counts from 0); of nested phases the innermost counts."""
    own = _own
    if own is None or threading.get_ident() != own.thread:
        yield
        return
    before = own.phase, own.step
    own.phase = name.encode()[:80]
    own.step = own.step if step is None else step + 1
    own.beat()
    try:
        yield
    finally:
        own.phase, own.step = before
        own.beat()


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Allow silence of up to ``seconds`` in the body."""
    own = _own
    if own is None or threading.get_ident() != own.thread:
        yield
        return
    before, own.timeout_s = own.timeout_s, max(own.timeout_s, seconds)
    own.beat()
    try:
        yield
    finally:
        own.timeout_s = before
        own.beat()


async def beat_periodically(describe: Callable[[], str] = lambda: "serving", period_s: float = 1.0) -> None:
    """Send heartbeats from an event loop until cancelled, with ``describe()`` as the phase."""
    while True:
        set_phase(describe())
        await asyncio.sleep(period_s)
