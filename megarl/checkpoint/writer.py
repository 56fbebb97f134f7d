"""A forked process that writes this one's memory as it was at the fork, while this one goes on."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

from megarl import pulse

T = TypeVar("T")
NICENESS = 10
"""The writer has until the next checkpoint, the trainer waits for nobody."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Writer(Generic[T]):
    """Runs ``work()`` in a child of its own, which dies with this process; ``work`` must touch no GPU, no process group and no lock
    that another thread may hold, and its result must be picklable.

    The child shares this process's memory, page by page until one of them writes: a snapshot without a copy. It ignores the signals
    that ask a job to end, since its parent then waits for it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        context = multiprocessing.get_context("fork")
        self._receive, send = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(work, send, os.getpid()), daemon=True)
        self._process.start()
        send.close()

    @property
    def done(self) -> bool:
        """Whether ``result`` will not wait."""
        return self._receive.poll() or not self._process.is_alive()

    def result(self) -> T:
        """What ``work`` returned; waits for it.

        Raises:
            OSError, RuntimeError: what ``work`` raised, or that the process died.
        """
        written = self._written()
        while not self._receive.poll(1.0) and self._process.is_alive():
            before, written = written, self._written()
            if written != before:
                pulse.mark()  # it writes; one that does not is a stall
        try:
            result, error = self._receive.recv()
        except EOFError:
            result, error = None, None
        self._process.join()
        if error is not None:
            raise error
        if result is None:
            raise RuntimeError(f"the process that writes it ended with status {self._process.exitcode}")
        return result[0]

    def _written(self) -> str:
        """Changes while the process writes."""
        try:
            return Path(f"/proc/{self._process.pid}/io").read_text()
        except OSError:
            return ""

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(work: Callable[[], T], send: Connection, parent: int) -> None:
    gc.disable()  # it would free what belongs to the parent, on a GPU too
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call above
        os._exit(1)
    os.nice(NICENESS)
    try:
        send.send(((work(),), None))
    except (OSError, RuntimeError) as error:
        send.send((None, error))
