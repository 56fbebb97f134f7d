"""Children that end with their parent, however it ends: no orphans after kill -9."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec only the call itself is safe


def die_with(parent: int, number: int) -> None:
    """In a child: ask Linux for signal ``number`` when the thread that started it is gone. A change of user would undo it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before the call above
        os._exit(1)
