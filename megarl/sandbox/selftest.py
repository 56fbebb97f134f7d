"""Self-test of the isolation before the first program, and the sandbox that it has proven.

It takes 0.2 s. A kernel, container or cluster without one of the layers is detected here, not by a submission.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.core.errors import SandboxError
from megarl.sandbox import bubblewrap
from megarl.sandbox.bubblewrap import ALLOWED_BY, ENVIRONMENT
from megarl.sandbox.interface import MIB, Limits, Test
from megarl.sandbox.local import LocalSandbox

LIMITS = Limits(
    cpu_s=20, wall_s=20.0, address_space_bytes=256 * MIB, memory_bytes=256 * MIB, processes=8,
    output_bytes=MIB, file_bytes=MIB, tmp_bytes=8 * MIB,
)  # fmt: skip
TREE = Limits(cpu_s=20, wall_s=20.0, address_space_bytes=256 * MIB, memory_bytes=96 * MIB, processes=8)
VISIBLE = {
    "top": {"dev", "lib", "lib64", "proc", "python", "tmp", "usr"},
    "dev": {
        "console",
        "core",
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    },
    "environment": {*ENVIRONMENT, "PYTHONHOME", "LD_LIBRARY_PATH", "PWD", "LC_CTYPE"},
}
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
GONE_S = 10.0
FIX = (
    f"It needs unprivileged user, pid and network namespaces and seccomp ({ALLOWED_BY}), and Linux "
    "5.14 or later for the limit on processes; or set reward.code.url to a `megarl sandbox serve` on a host that has "
    "them"
)

PROBE = """
import json, os, socket, sys
secret, port, pid, variable = json.loads(sys.stdin.read())
def fails(action, *arguments):
    try:
        action(*arguments)
    except (OSError, MemoryError) as error:
        return True
    return False
def write(path):
    with open(path, "w") as file:
        file.write("x")
def connect(address):
    with socket.create_connection(address, 2):
        pass
def fill_tmp():
    try:
        for i in range(16):
            with open(f"/tmp/{i}", "wb", 0) as file:
                if file.write(bytes(2**20)) < 2**20:
                    raise OSError("full")
    finally:
        for name in os.listdir("/tmp"):  # stdout lies there too
            os.remove("/tmp/" + name)
def big_file():
    with open("/tmp/big", "wb", 0) as file:
        for _ in range(3):
            file.write(bytes(2**20))
def fork_many():
    children = []
    try:
        for _ in range(3 * 8):
            child = os.fork()
            if child == 0:
                import time
                time.sleep(30)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "top": sorted(os.listdir("/")),
    "dev": sorted(os.listdir("/dev")),
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in os.listdir("/proc/self/ns")},
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]],
    "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "environment": sorted(os.environ),
    "uid": os.getuid(),
    "capabilities": [status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privs": status["NoNewPrivs"].strip(),
    "seccomp": status["Seccomp"].strip(),
    "fails": {
        "a file of the host is read": fails(open, secret),
        "a file of the host is read through process 1": fails(open, "/proc/1/root" + secret),
        "process 1 is read": fails(open, "/proc/1/environ") and fails(os.listdir, "/proc/1/fd"),
        "a port of the host is reached": fails(connect, ("127.0.0.1", port)),
        "a process of the host is signalled": fails(os.kill, pid, 0),
        **{f"{path} is written": fails(write, path) for path in
           ("/x", "/usr/lib/x", "/python/lib/x", "/dev/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
            "/etc/x")},
        "a packet socket is opened": fails(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
        "a netlink socket is opened": fails(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW),
        "more processes are started than the limit": fails(fork_many),
        "more memory is taken than the limit": fails(bytearray, 512 * 2**20),
        "a file grows beyond the limit": fails(big_file),
        "/tmp grows beyond the limit": fails(fill_tmp),
    },
}))
"""
TREE_PROBE = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(64 * 2**20)
        time.sleep(30)
time.sleep(30)
"""
DAEMON_PROBE = """
import os, signal, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(3, b"daemon")
        while True:
            time.sleep(1)
    os._exit(0)
while True:
    pass
"""
LEAVE_PROBE = """
import os, time
others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
print(os.listdir("/tmp"), os.listdir("/dev/shm"), others)
open("/tmp/left", "w").close()
open("/dev/shm/left", "w").close()
if os.fork() == 0:
    os.setsid()
    time.sleep(30)
    os._exit(0)
"""


def prove(sandbox: LocalSandbox) -> None:
    """Raise SandboxError listing all failed probes."""
    try:
        wrong = [*_probe(sandbox), *_next(sandbox), *_tree(sandbox), *_kill(sandbox)]
    except SandboxError as error:
        raise SandboxError(f"this machine does not isolate programs, so none is run: {error}. {FIX}") from error
    if wrong:
        raise SandboxError(
            f"this machine does not isolate programs, so none is run; in the sandbox ({sandbox.describe()}): "
            f"{'; '.join(wrong)}. {FIX}"
        )


def _probe(sandbox: LocalSandbox) -> Iterator[str]:
    variable = "MEGARL_SANDBOX_CANARY"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o755)
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        asked = json.dumps([str(secret), server.getsockname()[1], os.getpid(), variable])
        result = sandbox.run(PROBE, [Test(asked)], LIMITS)[0]
    if not result.ok:
        yield f"the probe itself fails ({result.reason})"
        return
    found: dict[str, Any] = json.loads(result.stdout)
    expected: dict[str, Any] = {
        "interfaces": ["lo"],
        "pids": [1, 2],
        "uid": 1000,
        "capabilities": ["0" * 16] * 5,
        "no_new_privs": "1",
        "seccomp": "2",
    }
    for name, value in expected.items():
        if found[name] != value:
            yield f"{name} {found[name]} instead of {value}"
    for name in NAMESPACES:
        if found["namespaces"].get(name) == os.readlink(f"/proc/self/ns/{name}"):
            yield f"the {name} namespace is the host's"
    for name, allowed in VISIBLE.items():
        if surplus := set(found[name]) - allowed:
            yield f"{name} has {', '.join(sorted(surplus))}"
    yield from (what for what, failed in found["fails"].items() if not failed)


def _next(sandbox: LocalSandbox) -> Iterator[str]:
    """Yield an error if a program sees an earlier program's files."""
    for _ in range(2):
        result = sandbox.run(LEAVE_PROBE, [Test()], LIMITS)[0]
        if result.stdout != "[] [] []\n":
            yield f"a program finds what another has left: {result.stdout.strip() or result.reason}"


def _tree(sandbox: LocalSandbox) -> Iterator[str]:
    result = sandbox.run(TREE_PROBE, [Test()], TREE)[0]
    if result.limit != "memory":
        yield "processes that take more memory together than the limit go on"


def _kill(sandbox: LocalSandbox) -> Iterator[str]:
    """Check that a daemon ignoring all signals is killed: the other end of its socket closes."""
    here, there = socket.socketpair()
    with here:
        with sandbox.open(LIMITS, there) as box:
            there.close()
            box.start_answer(DAEMON_PROBE, LIMITS, LIMITS.wall_s)
            here.settimeout(GONE_S)
            started = _receive(here)
        if started != b"daemon":
            yield "the probe for the kill of the whole tree does not start"
        elif _receive(here) != b"":
            yield "a daemon outlives the sandbox"


def _receive(link: socket.socket) -> bytes | None:
    try:
        return link.recv(6)
    except TimeoutError:
        return None


_lock = threading.Lock()
known: dict[str | None, LocalSandbox] = {}
"""Requested interpreter -> sandbox proven by a self-test."""


def local_sandbox(python: str | None = None) -> LocalSandbox:
    """Return this machine's sandbox with interpreter ``python`` (None: a default), after one self-test per process.

    Raises SandboxError if the isolation is not proven.
    """
    with _lock:
        if python not in known:
            found = bubblewrap.find(python)
            try:
                sandbox = LocalSandbox(found)
                prove(sandbox)
            except SandboxError as error:
                sandbox = LocalSandbox(dataclasses.replace(found, nested=False))
                prove(sandbox)
                logging.warning("each program is run by a separate bwrap, which is slow, for here %s", error)
            known[python] = sandbox
        return known[python]
