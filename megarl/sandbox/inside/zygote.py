"""Process 1 of a sandbox in which no program ever runs: it makes, one after the other, fresh sandboxes inside its own.

bwrap has shut this process off from the host; its Python is started and has imported what most programs import. For
each request it forks a process into new user, pid, mount, IPC and network namespaces with an empty /tmp and /dev/shm,
which gives up all capabilities, takes the seccomp filter and becomes the launcher. That costs a few ms instead of the
20 of another bwrap and Python. On request it kills all of that and reports when the last process is gone. From
inside a sandbox nothing of this process can be named: not its pid, its files, its descriptors. It knows no program, no
test and no result: those go over the descriptor that came with the request.

Requests, over the descriptor ``link`` and in lockstep: "S", bytes of /tmp, and one or two descriptors; or "E", answered
by "E".
"""

from __future__ import annotations

import _ctypes
import _socket
import array
import bisect  # noqa: F401  # from here on: what programs or the launcher will want
import collections  # noqa: F401
import copy  # noqa: F401
import fcntl
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import math  # noqa: F401
import os
import re  # noqa: F401
import resource  # noqa: F401
import select  # noqa: F401
import signal
import stat  # noqa: F401
import string  # noqa: F401
import struct
import sys
import time  # noqa: F401
import typing  # noqa: F401

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

REQUEST = struct.Struct("<cQ")
NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET. The names of the host and of the cgroup nobody here can change."""
UID = 1000
"""User id, as in host.py, of programs, and of this process in its own namespace."""
NOSUID, NODEV, NOEXEC = 2, 4, 8
SHM_BYTES = 16 * 2**20
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
"""Flags come first in both; all other arguments are 0."""
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: this program itself
functions = {name: _ctypes.dlsym(library, name) for name in ("syscall", "prctl", "mount", "capset")}


def call(name: str, *arguments: int | bytes | None) -> int:
    """A function of libc, without ``ctypes`` itself, which programs would then find imported."""
    result: int = _ctypes.call_function(functions[name], arguments)
    return result


def must(name: str, *arguments: int | bytes | None) -> None:
    if call(name, *arguments) != 0:
        raise OSError(f"{name}{arguments} fails")


def write(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, text)
    os.close(descriptor)


def fork_into(namespaces: int) -> int:
    """Like ``os.fork``; the child is process 1 in new namespaces. ``unshare`` would take one more process in between,
    which costs a millisecond.

    What ``os.fork`` does beside matters where there are other threads, or to ``raise`` (libc goes on with the zygote's
    thread id): not to the launcher, which starts its tests by ``os.fork``.
    """
    process = call("syscall", SYS_CLONE[os.uname().machine], namespaces | signal.SIGCHLD, 0, 0, 0, 0)
    if process < 0:
        raise OSError(f"clone({namespaces:#x}) fails")
    return process


def map_user() -> None:
    must("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the files below are root's
    write("/proc/self/setgroups", b"deny")
    write("/proc/self/uid_map", b"%d %d 1" % (UID, UID))
    write("/proc/self/gid_map", b"%d %d 1" % (UID, UID))


def furnish(tmp_bytes: int) -> None:
    """Set up the new mount and network namespaces; the rest is our own sandbox's, read-only, and cannot be
    unmounted."""
    must("mount", b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None)
    for path, size in ((b"/dev/shm", SHM_BYTES), (b"/tmp", tmp_bytes)):
        must("mount", b"tmpfs", path, b"tmpfs", NOSUID | NODEV, b"size=%d,mode=0755" % size)
    os.chdir("/tmp")
    any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(any_socket.fileno(), SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    any_socket.close()


def lock(refused: Any) -> None:
    """Give up every capability of the new user namespace, forever, and take the filter."""
    number = 0
    while call("prctl", PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    must("capset", struct.pack("<Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    must("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    address, size = refused.buffer_info()
    must("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("@HP", size // 8, address), 0, 0)


def complain(link: int, error: BaseException) -> None:
    os.write(link, f"!{type(error).__name__}: {error}"[:1000].encode())


def child(
    launcher: dict[str, Any], ready: dict[str, Any], refused: Any, tmp_bytes: int, link: int, passed: int
) -> None:
    """Never returns."""
    try:
        try:
            map_user()
            furnish(tmp_bytes)
            lock(refused)
        except BaseException as error:
            complain(link, error)
        else:
            launcher["serve"](ready, link, passed)
    finally:
        os._exit(0)


def end_all() -> None:
    """End every sandbox in ours. When its process 1 can be waited for, the kernel has ended all others of its pid
    namespace."""
    try:  # noqa: SIM105
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def serve(code: dict[str, CodeType], filter: bytes, link: int) -> None:
    if os.getpid() != 1:
        sys.exit("the launcher is not process 1 of a pid namespace")
    os.environ.pop("LD_BIND_NOW", None)  # for us alone
    sys.path[:] = [path for path in sys.path if path] + [path for path in ("/python/site",) if os.path.isdir(path)]
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, link)
    refused = array.array("B", filter)
    launcher: dict[str, Any] = {"__name__": "launcher"}
    exec(code["launcher"], launcher)
    ready = launcher["load"](code)
    launcher["rehearse"](ready)
    gc.collect()
    gc.disable()
    gc.freeze()
    control.send(b"R")
    while True:
        message, ancillary, _, _ = control.recvmsg(REQUEST.size, _socket.CMSG_SPACE(8))
        if len(message) < REQUEST.size:
            os._exit(0)
        kind, tmp_bytes = REQUEST.unpack(message)
        if kind == b"E":
            end_all()
            control.send(b"E")
            continue
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        try:
            process = fork_into(NAMESPACES)
        except OSError as error:
            complain(descriptors[0], error)
        else:
            if process == 0:
                control.close()
                child(
                    launcher, ready, refused, tmp_bytes, descriptors[0], descriptors[1] if len(descriptors) > 1 else -1
                )
        for descriptor in descriptors:
            os.close(descriptor)


serve(globals()["code"], globals()["filter"], globals()["link"])
