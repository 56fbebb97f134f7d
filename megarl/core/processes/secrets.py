"""Keys: proven to a peer, protected from other processes and from ``/proc``."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import mmap
import os
import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.core.durable import sync
from megarl.core.errors import ConfigError


def challenge() -> str:
    return secrets.token_hex(16)


def prove(key: str, challenge: str, side: str) -> str:
    """Return the proof of one ``side`` of a connection; it is not valid for the other side."""
    return hmac.new(key.encode(), _bytes(f"megarl {side} {challenge}"), hashlib.sha256).hexdigest()


def is_proof(given: object, key: str, challenge: str, side: str) -> bool:
    return hmac.compare_digest(_bytes(str(given)), _bytes(prove(key, challenge, side)))


def _bytes(text: str) -> bytes:
    """Encode text, also with surrogates, which JSON may contain."""
    return text.encode("utf-8", "surrogatepass")


SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
"""Pattern of names of secret variables."""
_LIBC = ctypes.CDLL(None)


def hide_secrets() -> None:
    """Overwrite the values of secret variables in ``/proc/<pid>/environ``, which other processes can read.

    Call it at the start of a process. ``os.environ`` and programs started later keep the values.
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
        os.environ[variable] = os.environ[variable]  # copied to other memory


def shared_key(path: Path) -> str:
    """Return the key in a file that only this user can read; create it if missing. Programs that create it at the same
    moment get the same key.

    Raises ConfigError if others can read the file, or it contains no key.
    """
    if not path.exists():
        _make_key(path)
    try:
        mode, key = path.stat().st_mode & 0o777, path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); run all programs as one user") from error
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:03o}, so others may know the key; remove it, end the run's programs")
    if not key:
        raise ConfigError(f"{path} is empty; remove it and start the run's programs again")
    return key


def _make_key(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
        sync(temporary)
        os.link(temporary, path)  # fails if another program was first
        sync(path.parent)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); set run.dir to another place") from error
    finally:
        temporary.unlink(missing_ok=True)


_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_LIBC_WITH_ERRNO = ctypes.CDLL(None, use_errno=True)
_LIBC_WITH_ERRNO.sbrk.restype = ctypes.c_void_p
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
    brk = _LIBC_WITH_ERRNO.sbrk(0)
    places = (start_code, end_code, start_data, end_data, start_brk, brk, start_stack, begin, middle, middle, end)
    record = ctypes.create_string_buffer(_MAP.pack(*places, 0, 0, 2**32 - 1))
    done = _LIBC_WITH_ERRNO.prctl(_PR_SET_MM, _PR_SET_MM_MAP, record, ctypes.c_ulong(_MAP.size), ctypes.c_ulong(0))
    if done == 0:
        _shown.append(memory)
    return bool(done == 0)
