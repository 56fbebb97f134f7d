"""Set the command line and environment that ``/proc`` shows for a forked process that became another program."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Mapping, Sequence

from megarl.core.processes.secrets import SECRET

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sbrk.restype = ctypes.c_void_p
_MAP = struct.Struct("<12QII")
"""``struct prctl_mm_map``: code, data, brk, stack, arguments, environment; auxv and its size; file descriptor."""
_shown: list[mmap.mmap] = []
"""Memory that the kernel reads for ``/proc``."""


def show_as(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Show ``words`` and ``environment``, without secrets, in ``/proc``; False if the kernel refuses.

    ``ps``, py-spy and a search for processes by variable then work as for a fresh program.
    """
    arguments = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(
        os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items() if not SECRET.search(name)
    )
    with open("/proc/self/stat", "rb") as file:
        # Fields 26-28 and 45-47 of proc(5), counted from the state, which is the third.
        stat = [int(word) for word in file.read().rpartition(b")")[2].split()[1:]]
    start_code, end_code, start_stack, start_data, end_data, start_brk = (stat[n - 4] for n in (26, 27, 28, 45, 46, 47))
    # Private: the kernel does not show shared memory there.
    memory = mmap.mmap(-1, len(arguments) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(arguments + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = begin + len(arguments), begin + len(arguments) + len(variables)
    brk = _LIBC.sbrk(0)
    places = (start_code, end_code, start_data, end_data, start_brk, brk, start_stack, begin, middle, middle, end)
    record = ctypes.create_string_buffer(_MAP.pack(*places, 0, 0, 2**32 - 1))
    done = _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, record, ctypes.c_ulong(_MAP.size), ctypes.c_ulong(0))
    if done == 0:
        _shown.append(memory)
    return bool(done == 0)
