"""Protect keys in this process's environment from other processes."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
from pathlib import Path

from megarl.core.durable import sync
from megarl.core.errors import ConfigError

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
