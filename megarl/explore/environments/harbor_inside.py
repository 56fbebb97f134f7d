"""First program in the sandbox of a Harbor task: it unpacks files, runs commands, and reads the tests' reward.

Passed as text to an interpreter that may differ from ours (Python 3.9 or later). Runs as process 1 of the sandbox,
which commands can neither kill nor read. A request is a line of JSON and ``size`` bytes of a tar file; a reply is a
line of JSON.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE = 4
WATCH_S = 0.2
REWARD_BYTES = 2**16
CLOSED_S = 0.01
"""Seconds between two polls of a program that has closed its output."""
PIECES = 64
"""Most reads before the limits are checked again."""
PROCESSES = 256
EMPTY_S = 10.0
"""Timeout in seconds to remove files that an episode put in place of the tests."""
TESTS, LOGS, VERIFIER = "/tests", "/logs", "/logs/verifier"
INODE_BYTES = 1024
"""Kernel memory in bytes of a tmpfs file besides its content, including its attributes."""
REWARDS = ("reward.json", "reward.txt")
"""Reward files; the first existing one counts, as in Harbor."""


def main() -> None:
    """Serve requests until the connection closes; the sandbox ends with this process."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # else a command could open the link in /proc
    descriptor = int(sys.argv[1])
    link = socket.socket(fileno=descriptor).makefile("rwb")
    while line := link.readline():
        asked = json.loads(line)
        data = link.read(asked["size"])
        began = time.monotonic()
        try:
            reply = tests(asked, data) if asked["do"] == "tests" else start(asked, data)
        except Exception as error:  # else an episode could end the sandbox, and with it the verdict
            text = f"{type(error).__name__}: {error}"[: asked["most"]]
            reply = {"output": text, "limit": "", "seconds": time.monotonic() - began}
        link.write(json.dumps(reply).encode() + b"\n")
        link.flush()
        watch(descriptor, asked["memory"])


def watch(link: int, memory: int) -> None:
    """Wait for the next request; kill a command's leftover processes if they exceed ``memory``."""
    waiting = select.poll()  # a descriptor may be too large for select.select
    waiting.register(link, select.POLLIN)
    while not waiting.poll(WATCH_S * 1000 if reap(os.WNOHANG) else None):
        if tree_bytes() + inode_bytes() > memory:
            kill_all()


def start(asked: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Unpack files, if any, and run a command."""
    if data:
        unpack(data, "/")
    os.makedirs(asked["cwd"], exist_ok=True)
    return run(["/bin/bash", "-c", asked["command"]], asked)


def tests(asked: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Kill the episode's processes, run the tests, and read their reward."""
    kill_all()
    os.chmod(LOGS, 0o755)
    for folder in (VERIFIER, TESTS):
        empty(folder)
    unpack(data, TESTS)
    os.chmod(f"{TESTS}/test.sh", 0o755)
    reply = run([f"{TESTS}/test.sh"], asked)
    kill_all()
    for name in REWARDS:
        if (text := reward(f"{VERIFIER}/{name}")) is not None:
            return {**reply, "reward": text, "file": name}
    return reply


def unpack(data: bytes, folder: str) -> None:
    """Unpack a tar file of the task. A failure, which an episode cannot cause, ends the sandbox."""
    trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as files:
            files.extractall(folder, **trusted)  # type: ignore[arg-type]
    except Exception as error:
        raise SystemExit(f"the task's files cannot be unpacked into {folder}: {error}") from error


def empty(folder: str) -> None:
    """Replace whatever is at ``folder`` by an empty folder; mount points stay.

    Nested folders are moved up before removal, because their paths and a recursion could get too long.
    """
    if os.path.lexists(folder) and not is_folder(folder):
        os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o755)
    until, own, folders = time.monotonic() + EMPTY_S, os.urandom(8).hex(), [folder]
    for path in folders:
        for name in os.listdir(path):
            inner = os.path.join(path, name)
            if time.monotonic() > until:
                raise TimeoutError(f"{folder} cannot be emptied within {EMPTY_S:g} s")
            if not is_folder(inner):
                os.unlink(inner)
                continue
            os.chmod(inner, 0o700)  # moving a folder needs write permission
            folders.append(os.path.join(folder, f"{own}-{len(folders)}"))
            os.rename(inner, folders[-1])
        if path != folder:
            os.rmdir(path)


def is_folder(path: str) -> bool:
    """Return True for a folder, False for a link to one."""
    return stat.S_ISDIR(os.lstat(path).st_mode)


def reward(path: str) -> str | None:
    """Return the text of a reward file; None if missing or too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with open(descriptor, "rb") as file:
        text = file.read(REWARD_BYTES + 1)
    return None if len(text) > REWARD_BYTES else text.decode("utf-8", "replace")


def run(words: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    """Run a program until its end or a limit; return the first and last bytes of its output, and the limit it
    reached."""
    began, limit, output = time.monotonic(), "", Output(asked["most"] // 2)
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, cwd=asked["cwd"], env=asked["env"],
            start_new_session=True, preexec_fn=limit_myself,
        )  # fmt: skip
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    os.set_blocking(reader, False)
    while True:
        ended = process.poll() is not None  # checked before the read, so that the read gets all its output
        left = asked["seconds"] - (time.monotonic() - began)
        if not ended:
            limit = "time" if left <= 0 else "memory" if tree_bytes() + inode_bytes() > asked["memory"] else ""
        if not output.read(reader, 0.0 if ended or limit else min(left, WATCH_S)):
            time.sleep(0.0 if ended or limit else min(left, CLOSED_S))
        if ended or limit:
            break
    if limit == "memory":
        kill_all()
    elif limit:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.close(reader)
    reap(os.WNOHANG)
    return {"output": output.text(), "limit": limit, "seconds": time.monotonic() - began}


class Output:
    """First and last ``most`` bytes written to a pipe."""

    def __init__(self, most: int) -> None:
        self.most, self.total, self.head, self.tail = most, 0, b"", b""

    def read(self, pipe: int, wait_s: float) -> bool:
        """Read what arrives within ``wait_s`` seconds; return False once all writers have closed the pipe."""
        select.select([pipe], [], [], wait_s)
        for _ in range(PIECES):
            try:
                piece = os.read(pipe, 2**16)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self.total += len(piece)
            new = self.most - len(self.head)
            self.head += piece[:new]
            self.tail = (self.tail + piece[new:])[-self.most :]
        return True

    def text(self) -> str:
        """Return the kept text."""
        lost = self.total - len(self.head) - len(self.tail)
        mark = f"\n({lost} more bytes)\n".encode() if lost else b""
        return (self.head + mark + self.tail).decode("utf-8", "replace")


def limit_myself() -> None:
    """Set resource limits of a command and its descendants."""
    for which, most in ((resource.RLIMIT_NPROC, PROCESSES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0)):
        hard = resource.getrlimit(which)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (bound, bound))


def tree_bytes() -> int:
    """Return the resident bytes of all other processes in the sandbox; shared pages count for each."""
    total = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1":
            try:
                with open(f"/proc/{entry}/statm", "rb") as file:
                    total += int(file.read().split()[1])
            except (OSError, IndexError):  # the process has just ended
                continue
    return total * resource.getpagesize()


def inode_bytes() -> int:
    """Return the kernel memory of files besides their contents: an episode can create millions of empty files."""
    with open("/proc/self/mounts", "rb") as file:
        mounts = [line.split(b" ") for line in file]
    places = [mount[1] for mount in mounts if mount[2] == b"tmpfs"]
    found = [os.statvfs(place.decode("unicode_escape").encode("latin-1")) for place in places]  # a space is \\040
    return INODE_BYTES * sum(place.f_files - place.f_ffree for place in found)


def kill_all() -> None:
    """Kill every other process of the sandbox and wait for their end."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    reap(0)


def reap(flags: int) -> bool:
    """Reap ended processes; return False if no other process is left."""
    try:
        while os.waitpid(-1, flags)[0]:
            pass
    except ChildProcessError:
        return False
    return True


main()
