"""Bubblewrap (``bwrap``): the one place that writes its command line and starts it.

A program inside always has separate namespaces (files, processes, network, users) and no capabilities. It is killed
when the thread that started it ends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from megarl.core.errors import SandboxError

INSIDE_UID = 1000
SHM_BYTES = 16 * 2**20
ALLOWED_BY = (
    "sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
    "user.max_user_namespaces above 0; docker run --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined"
)
"""Settings of a machine or container that allow namespaces."""
ETC = (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "nsswitch.conf", "passwd", "pki", "protocols", "services", "ssl",
)  # fmt: skip
"""Files of /etc that programs read; none is secret."""
LOOKUPS = tuple(word for name in ETC for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}"))
"""Arguments that show ``ETC``."""
LAST_BYTES = 4096
"""Most bytes of bwrap's error text that are read."""


def command(
    bwrap: str,
    words: Sequence[str],
    *,
    shown: Sequence[str],
    writable: Mapping[str, int],
    on_top: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    inherits: bool = False,
    shm_bytes: int = SHM_BYTES,
    folder: str | None = None,
    filter_fd: int | None = None,
) -> list[str]:
    """Return the command line that runs ``words`` and hides this machine from them.

    Args:
        shown: Arguments that show files and folders, read-only.
        writable: Folder -> most bytes in it. It starts empty, is in memory, and hides files of ``shown`` there.
        on_top: Arguments that show files inside of the ``writable`` folders.
        variables: Environment variables inside.
        inherits: Keep the caller's user and environment variables, and bwrap's own process 1. Without this the program
            is process 1 with the user ``INSIDE_UID``.
        shm_bytes: Most bytes of /dev/shm. Nothing else in /dev can be written.
        folder: Working directory inside.
        filter_fd: Descriptor from which bwrap reads the filter of system calls; None for no filter.
    """
    user = [] if inherits else ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
    return [
        bwrap, "--unshare-all", "--unshare-user", *user, "--hostname", "sandbox", "--die-with-parent", "--new-session",
        *([] if inherits else ["--as-pid-1"]), "--cap-drop", "ALL", *([] if inherits else ["--clearenv"]),
        *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        *shown, "--proc", "/proc", "--dev", "/dev", *_writable("/dev/shm", shm_bytes), "--remount-ro", "/dev",
        *(word for place, most in writable.items() for word in _writable(place, most)),
        *on_top, "--remount-ro", "/", *([] if folder is None else ["--chdir", folder]),
        *([] if filter_fd is None else ["--seccomp", str(filter_fd)]), "--", *words,
    ]  # fmt: skip


def as_they_are(paths: Sequence[str]) -> list[str]:
    """Return arguments that mount folders read-only at their path and keep links; missing paths are left out."""
    arguments = []
    for path in paths:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    return arguments


def start(words: Sequence[str], passed: Sequence[int], user: int | None) -> subprocess.Popen[bytes]:
    """Start a command line as ``user``, with only the descriptors ``passed`` and without environment variables.

    Raises SandboxError if bwrap is missing or cannot be run.
    """
    try:
        return subprocess.Popen(
            words, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            cwd="/", env={}, **popen_user(user),
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"{words[0]} does not start: {error}") from error


def popen_user(user: int | None) -> dict[str, Any]:
    """Return arguments of ``subprocess`` that start a program as ``user``; ``{}`` for None, which keeps our user."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


@contextmanager
def filter_pipe(program: bytes) -> Iterator[int]:
    """Yield the descriptor from which bwrap reads ``program``, the filter of system calls; closed on leaving."""
    reader, writer = os.pipe()
    try:
        os.write(writer, program)
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def last_words(process: subprocess.Popen[bytes]) -> str:
    """Return the error text so far of a process started by ``start``."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)  # its children may keep the other end open
    return (process.stderr.read(LAST_BYTES) or b"").decode(errors="replace").strip()


def _writable(place: str, most: int) -> tuple[str, ...]:
    return "--size", str(most), "--tmpfs", place
