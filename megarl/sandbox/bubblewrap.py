"""Bubblewrap (``bwrap``): its command line, the system calls that it refuses, and what it needs of this machine.

A list of refusals, not of permissions: Python and its extensions need most calls, and the namespaces do the isolating.
Refused are calls that bypass them (other namespaces, other processes' memory, kernel interfaces with a history of
holes) and calls that allocate uncounted memory (System V shared memory, memfds). Sockets are those of the empty network
namespace: UNIX and IP; not vsock, netlink or the kernel's crypto. Numbers from the kernel's ``unistd_64.h`` and
``asm-generic/unistd.h``.

A program inside always has separate namespaces (files, processes, network, users) and no capabilities. It is killed
when the thread that started it ends.

Found once per process.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.core.errors import SandboxError

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

REFUSED = {
    # name: (x86_64, aarch64); -1 where the architecture has none
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "personality": (135, 92),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "lookup_dcookie": (212, 18),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
CLONE3 = (435, 435)  # its flags are in memory, which a filter cannot read; with ENOSYS libc uses clone instead
CLONE = (56, 220)
SOCKET = (41, 198)
IOCTL = (16, 29)
X32 = 0x40000000
"""Bit of the second set of system calls of x86_64."""
CLONE_NEW = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. NEWTIME shares bits with the exit signal,
used only by signals above 127."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARGUMENT_0, ARGUMENT_1 = 0, 4, 16, 24  # offsets in struct seccomp_data, little endian
KILL, ALLOW = 0x80000000, 0x7FFF0000


def _refuse(error: int) -> bytes:
    return _op(RETURN, 0x00050000 | error)


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One ``struct sock_filter``; the jumps count instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, k)


def _instructions(machine: str) -> Iterator[bytes]:
    column = list(AUDIT_ARCH).index(machine)
    yield _op(LOAD, ARCH)
    yield _op(EQUAL, AUDIT_ARCH[machine], 1, 0)
    yield _op(RETURN, KILL)  # another architecture's calls (int 0x80) have other numbers
    yield _op(LOAD, NR)
    if machine == "x86_64":
        yield _op(AT_LEAST, X32, 0, 1)
        yield _refuse(errno.ENOSYS)
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            yield _op(EQUAL, numbers[column], 0, 1)
            yield _refuse(errno.EPERM)
    yield _op(EQUAL, CLONE3[column], 0, 1)
    yield _refuse(errno.ENOSYS)
    yield _op(EQUAL, CLONE[column], 0, 4)
    yield _op(LOAD, ARGUMENT_0)
    yield _op(ANY_BIT, CLONE_NEW, 0, 1)
    yield _refuse(errno.EPERM)
    yield _op(RETURN, ALLOW)
    yield _op(EQUAL, SOCKET[column], 0, 3 + len(FAMILIES))
    yield _op(LOAD, ARGUMENT_0)
    for i, family in enumerate(FAMILIES):
        yield _op(EQUAL, family, len(FAMILIES) - i, 0)
    yield _refuse(errno.EPERM)
    yield _op(RETURN, ALLOW)
    yield _op(EQUAL, IOCTL[column], 0, 4)
    yield _op(LOAD, ARGUMENT_1)
    yield _op(EQUAL, TIOCSTI, 1, 0)
    yield _op(EQUAL, TIOCLINUX, 0, 1)
    yield _refuse(errno.EPERM)
    yield _op(RETURN, ALLOW)


def program(machine: str | None = None) -> bytes:
    """Return the filter for this machine, or for one of ``AUDIT_ARCH``. Raises SandboxError for other architectures."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise SandboxError(
            f"the sandbox has no list of system calls for {machine}; it knows {', '.join(AUDIT_ARCH)}: set "
            "reward.code.url to a `megarl sandbox serve` on such a machine"
        )
    return b"".join(_instructions(machine))


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


NOBODY = 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
INSIDE = ("values", "answer", "checker", "launcher", "zygote")
ASK_S = 60.0
ENVIRONMENT = {
    "PATH": "/python/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program's output depends on its input alone
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
START = (
    "import marshal,sys\nname,link,passed=sys.argv[1],*map(int,sys.argv[2:])\n"
    "file=open(link,'rb',closefd=False)\ncode,filter=marshal.load(file),marshal.load(file)\n"
    "exec(code[name],{'code':code,'filter':filter,'link':link,'passed':passed})"
)

PREPARE = """
import json, marshal, os, sys, sysconfig
code = {name: compile(text, name, "exec", dont_inherit=True) for name, text in json.loads(sys.stdin.read()).items()}
facts = {"version": list(sys.version_info[:3]), "base": sys.base_prefix, "platlib": sys.platlibdir,
         "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
         "site": sysconfig.get_path("purelib"), "code": marshal.dumps(code).hex()}
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Host:
    bwrap: str
    python: str
    """The interpreter for programs, as named in the settings."""
    version: str
    binds: tuple[str, ...]
    """Arguments of bwrap that mount it read-only as /python."""
    code: bytes
    """Code that runs inside, compiled by that interpreter."""
    filter: bytes
    user: int | None
    """User id of bwrap; None for our own. RLIMIT_NPROC does not apply to root, so as root bwrap runs as the user
    `nobody`."""
    nested: bool = True
    """True makes sandboxes inside a long-lived one (``inside/zygote.py``); a separate bwrap for each takes five times
    as long."""

    def command(self, first: str, tmp_bytes: int, link: int, passed: int, filter_fd: int | None) -> list[str]:
        """Return the command that runs our module ``first`` inside as process 1; ``link`` and ``passed`` (unless -1)
        are its only open connections."""
        # Without LD_BIND_NOW each process of each sandbox would look up libc's functions again.
        variables = ENVIRONMENT | {"LD_BIND_NOW": "1"} if first == "zygote" else ENVIRONMENT
        return command(
            self.bwrap, ["/python/bin/python3", "-S", "-s", "-c", START, first, str(link), str(passed)],
            shown=self.binds, writable={"/tmp": tmp_bytes}, variables=variables, folder="/tmp", filter_fd=filter_fd,
        )  # fmt: skip


@functools.cache
def find(named: str | None = None) -> Host:
    """Find this machine's sandbox; ``named``: interpreter of programs (``reward.code.python``). Raises SandboxError
    naming what is missing and the fix."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(
            "code is only run in bubblewrap, and bwrap is not on the PATH: apt-get install bubblewrap (dnf, pacman: "
            "the same name), or set reward.code.url to a `megarl sandbox serve` on a host that has it"
        )
    user = NOBODY if os.geteuid() == 0 else None
    tried = []
    for python in (
        [named]
        if named
        else [getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]
    ):
        facts, why = ask(python, user, sources())
        if facts is None:
            tried.append(f"{python}: {why}")
            continue
        version = ".".join(map(str, facts["version"]))
        binds = tuple(_binds(facts, with_site=bool(named)))
        return Host(bwrap, python, version, binds, bytes.fromhex(facts["code"]), program(), user)
    raise SandboxError(
        f"no Python that {'uid 65534 (root starts sandboxes as nobody)' if user else 'this user'} can run: "
        f"{'; '.join(tried)}. Set reward.code.python (megarl sandbox --python) to an interpreter of version 3.9 or "
        "later that others may read"
    )


def sources() -> dict[str, str]:
    """Return our code that runs inside, by name."""
    folder = Path(__file__).parent / "inside"
    return {name: (folder / f"{name}.py").read_text() for name in INSIDE}


def ask(python: str, user: int | None, code: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Ask an interpreter for its version and paths, with our code compiled by it; or return the reason why it cannot be
    used."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", PREPARE], input=json.dumps(code), capture_output=True, text=True, timeout=ASK_S,
            cwd="/", env={"LANG": "C.UTF-8"}, **popen_user(user),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode != 0:
        return None, done.stderr.strip().rpartition("\n")[2][:300] or f"exit code {done.returncode}"
    facts = json.loads(done.stdout)
    if facts["version"] < [3, 9]:
        return None, f"version {facts['version']} is older than 3.9"
    return facts, ""


def _binds(facts: dict[str, Any], with_site: bool) -> list[str]:
    """Return bwrap's mounts: the system's libraries at their paths, the interpreter and its standard library under
    /python; no home, no /etc, no shell."""
    arguments = as_they_are(LIBRARIES)
    for name in dict.fromkeys(("lib", facts["platlib"])):
        if os.path.isdir(os.path.join(facts["base"], name)):
            arguments += ["--ro-bind", os.path.join(facts["base"], name), f"/python/{name}"]
    arguments += ["--ro-bind", facts["executable"], "/python/bin/python3", "--setenv", "PYTHONHOME", "/python"]
    arguments += ["--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    if with_site and os.path.isdir(facts["site"]):
        arguments += ["--ro-bind", facts["site"], "/python/site"]
    return arguments
