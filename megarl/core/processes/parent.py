"""End children with their parent, however it ends: no orphans after kill -9."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

log = logging.getLogger(__name__)

ALONE_S = 20.0
"""Seconds that processes may outlive their supervisor, to finish saving a checkpoint."""
LOOK_S = 1.0
"""Seconds between two checks of the parent."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec only the call itself is safe


def die_with(parent: int, number: int) -> None:
    """Ask Linux, in a child, for signal ``number`` when the thread that started it ends. A change of user cancels
    it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the prctl call
        os._exit(1)


_watched: list[float] = []
"""Seconds that this process outlives its parent; empty if the parent is not watched."""


def end_after_parent(after_s: float = ALONE_S) -> None:
    """End this process ``after_s`` after its parent's death, even if it is blocked: the reaper may be dead too.

    Forked children do the same. A second call changes nothing.
    """
    if not _watched:
        _watched.append(after_s)
        _watch()


def _watch() -> None:
    if _watched:
        threading.Thread(target=_outlive, args=(os.getppid(), *_watched), daemon=True, name="parent watch").start()


os.register_at_fork(after_in_child=_watch)  # a fork inherits no threads


def _outlive(parent: int, after_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    time.sleep(after_s)
    log.error("ending: the supervisor died %g s ago", after_s)
    os._exit(1)
