"""Keys in this process's environment, which other processes must not read."""

from __future__ import annotations

import ctypes
import os
import re

SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
"""Found in names of variables that hold a key."""
_LIBC = ctypes.CDLL(None)


def hide_secrets() -> None:
    """Overwrite the values of secret variables where ``/proc/<pid>/environ`` shows them, to any user.

    Call it at the start of a process. ``os.environ`` and the programs that are started later have them as before.
    """
    first = ctypes.POINTER(ctypes.c_void_p).in_dll(_LIBC, "environ")
    shown, place = list[str](), 0
    while address := first[place]:
        name, equals, value = ctypes.string_at(address).partition(b"=")
        if equals and SECRET.search(os.fsdecode(name)):
            ctypes.memset(address + len(name) + 1, ord("x"), len(value))
            shown.append(os.fsdecode(name))
        place += 1
    for variable in shown:
        os.environ[variable] = os.environ[variable]  # in memory of its own
