"""Heartbeats: where a process is now, in a page of memory that it shares with its supervisor.

A process that waits in C for a peer cannot be asked. So its main thread marks its progress here (half a µs a mark), and
on SIGUSR2 the stacks of all its threads are written after the page, even while it is blocked. Without a supervisor
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
from typing import NamedTuple

VARIABLE = "MEGARL_HEARTBEAT"
"""Number of the memory's descriptor, which a child inherits."""
ASK = signal.SIGUSR2
"""Makes a process write its stacks. SIGUSR1 is a person's: they go into its log then."""
PAGE = 4096
"""Bytes in front of the stacks."""
START = "start"
"""Phase of a process that is not yet at its work: imports, models, connections."""
_MEMORY = "megarl-heartbeat"
_RECORD = struct.Struct("<QQQqd80s")
_CHECK = struct.Struct("<I")
_SLOT = 256
"""Bytes from the place of even records to that of odd ones."""


class Heartbeat(NamedTuple):
    """The last heartbeat of a process."""

    thread: int = 0
    """Its main thread, as its stacks name it."""
    beats: int = 0
    """Marks so far; one that stays the same for long is a stall."""
    work: int = 0
    """Count of an explorer's work: answers that ended and were scored, heartbeats of engines that had generated tokens,
    seconds of workflows within their limits, and its waits for the store. It marks time without any as well."""
    step: int = 0
    """Step of the loop, from 1; 0 outside of steps."""
    timeout_s: float = 0.0
    """Seconds that its phase may be silent, where that is more than usual."""
    phase: str = START


def _record(slot: bytes) -> Heartbeat | None:
    """None where the writer is in the middle of it."""
    if not any(slot):
        return Heartbeat()
    if _CHECK.unpack_from(slot, _RECORD.size)[0] != zlib.crc32(slot[: _RECORD.size]):
        return None
    thread, beats, work, step, timeout_s, phase = _RECORD.unpack_from(slot)
    return Heartbeat(thread, beats, work, step, timeout_s, phase.rstrip(b"\0").decode(errors="replace"))


class Memory:
    """The supervisor's end. ``descriptor`` is handed to the child, with its number under ``VARIABLE``."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_MEMORY)
        os.ftruncate(self.descriptor, PAGE)
        os.lseek(self.descriptor, PAGE, os.SEEK_SET)  # the position is the child's too: stacks are appended

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read(self) -> Heartbeat:
        """The newest whole record; that of a process at its start when there is none."""
        for _ in range(1000):
            raw = os.pread(self.descriptor, 2 * _SLOT, 0)
            found = [_record(raw[place : place + _SLOT]) for place in (0, _SLOT)]
            # The writer may have been stopped in the middle of one record; both are torn only while it writes faster
            # than we read.
            if whole := [record for record in found if record is not None]:
                return max(whole, key=lambda record: record.beats)
        return Heartbeat()

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def stacks(self, start: int) -> str:
        """Text written from ``start`` on, a ``size`` of before."""
        return os.pread(self.descriptor, self.size() - start, start).decode(errors="replace")


class _Own:
    """This process's end."""

    def __init__(self, descriptor: int) -> None:
        self.map = mmap.mmap(descriptor, PAGE)
        self.thread = threading.main_thread().ident or 0
        self.count = self.work = self.step = 0
        self.timeout_s = 0.0
        self.phase = START.encode()

    def beat(self) -> None:
        if threading.get_ident() != self.thread:  # other threads are no measure of the one that others wait for
            return
        self.count += 1
        body = _RECORD.pack(self.thread, self.count, self.work, self.step, self.timeout_s, self.phase)
        # The record before this one stays whole meanwhile; a checksum shows a reader which of the two is.
        start = self.count % 2 * _SLOT
        self.map[start : start + len(body) + _CHECK.size] = body + _CHECK.pack(zlib.crc32(body))


_own: _Own | None = None


def begin() -> None:
    """Show this process to its supervisor, if it has one that looks (``VARIABLE``); its stacks on SIGUSR1 go to stderr
    either way."""
    global _own
    faulthandler.register(signal.SIGUSR1)
    if (descriptor := listen()) is not None:
        _own = _Own(descriptor)
        _own.beat()


def listen() -> int | None:
    """Only write stacks when asked to; returns the memory's descriptor, None without a supervisor that looks."""
    number = os.environ.get(VARIABLE, "")
    try:
        known = _MEMORY in os.readlink(
            f"/proc/self/fd/{int(number)}"
        )  # of a child's child the number may be another file's
    except (OSError, ValueError):
        return None
    if not known:
        return None
    faulthandler.register(ASK, file=int(number), all_threads=True)
    return int(number)


def _forget() -> None:
    global _own
    _own = None


os.register_at_fork(after_in_child=_forget)  # the page is the parent's


def beat() -> None:
    """Something went on: a micro-batch, a tensor, a round of waiting in which others were seen to be well."""
    if _own is not None:
        _own.beat()


def count_work() -> None:
    """A sample has ended, or has its score, or engines have generated more of one."""
    if _own is not None:
        _own.work += 1


def count_wait() -> None:
    """A moment of a wait that has an end of its own, for a database that is away: neither a stall nor an idle
    explorer."""
    count_work()
    beat()


def set_phase(phase: str) -> None:
    """The phase that this process is in when it is in no other; ends its start."""
    if _own is not None:
        _own.phase = phase.encode()[:80]
        _own.beat()


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Within, the process is in this phase (of a step counted from 0); of nested ones the innermost counts."""
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
    """Within, silence of up to ``seconds`` is nothing unusual."""
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
    """Marks for an event loop until cancelled, with a phase that names its work."""
    while True:
        set_phase(describe())
        await asyncio.sleep(period_s)
