"""First program in the sandbox of a Harbor task: it unpacks files, runs commands, and reads the tests' reward.

Run as a text by an interpreter that may be another one (Python 3.9 or later), as process 1 of the sandbox, which no
command can kill or read. A request is a line of JSON and ``size`` bytes of a tar file; a reply is a line of JSON.
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
"""Seconds between two looks at a program that has closed its output."""
PIECES = 64
"""Most reads before the limits are looked at again."""
PROCESSES = 256
EMPTY_S = 10.0
"""Longest time to remove what an episode has put in place of the tests."""
TESTS, LOGS, VERIFIER = "/tests", "/logs", "/logs/verifier"
INODE_BYTES = 1024
"""Kernel memory of a file in a tmpfs beside its content, as the kernel counts it; attributes of a file count too."""
REWARDS = ("reward.json", "reward.txt")
"""The first that is there counts, as in Harbor."""


def main() -> None:
    """Serve requests until the other side has gone; the sandbox ends with this process."""
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
    """Wait for the next request; end all that a command has left running when it takes more memory."""
    waiting = select.poll()  # a descriptor may be too large for select.select
    waiting.register(link, select.POLLIN)
    while not waiting.poll(WATCH_S * 1000 if reap(os.WNOHANG) else None):
        if tree_bytes() + inode_bytes() > memory:
            kill_all()


def start(asked: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Unpack files, if there are any, and run a command."""
    if data:
        unpack(data, "/")
    os.makedirs(asked["cwd"], exist_ok=True)
    return run(["/bin/bash", "-c", asked["command"]], asked)


def tests(asked: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Kill all that the episode has left running, run the tests, and read the reward that they write."""
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
    """Unpack a tar file of the task's own; ends the sandbox where that fails, which no episode can bring about."""
    trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as files:
            files.extractall(folder, **trusted)  # type: ignore[arg-type]
    except Exception as error:
        raise SystemExit(f"the task's files cannot be unpacked into {folder}: {error}") from error


def empty(folder: str) -> None:
    """Make a folder that has nothing in it, in place of whatever is there; a place of mounts stays.

    Folders in folders are moved up before they are removed: their paths, and a recursion, could be too long.
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
            os.chmod(inner, 0o700)  # a folder that is moved must be writable
            folders.append(os.path.join(folder, f"{own}-{len(folders)}"))
            os.rename(inner, folders[-1])
        if path != folder:
            os.rmdir(path)


def is_folder(path: str) -> bool:
    """Return True for a folder, but not for a link to one."""
    return stat.S_ISDIR(os.lstat(path).st_mode)


def reward(path: str) -> str | None:
    """Text of a reward file; None where it is none, or too large."""
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
    """Run a program until its end or a limit; its first and last bytes of output, and the limit that it met."""
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
        ended = process.poll() is not None  # before the output is read: all that it has written is then there
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
    """First and last bytes that are written to a pipe, so many of each."""

    def __init__(self, most: int) -> None:
        self.most, self.total, self.head, self.tail = most, 0, b"", b""

    def read(self, pipe: int, wait_s: float) -> bool:
        """Read what is there, or comes within some time; False where all have closed the pipe."""
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
        """Return the text that was kept."""
        lost = self.total - len(self.head) - len(self.tail)
        mark = f"\n({lost} more bytes)\n".encode() if lost else b""
        return (self.head + mark + self.tail).decode("utf-8", "replace")


def limit_myself() -> None:
    """Limits of a command's own process, and of those that it starts."""
    for which, most in ((resource.RLIMIT_NPROC, PROCESSES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0)):
        hard = resource.getrlimit(which)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (bound, bound))


def tree_bytes() -> int:
    """Resident memory of all other processes here. Pages that they share count for each."""
    total = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1":
            try:
                with open(f"/proc/{entry}/statm", "rb") as file:
                    total += int(file.read().split()[1])
            except (OSError, IndexError):  # it has just ended
                continue
    return total * resource.getpagesize()


def inode_bytes() -> int:
    """Kernel memory of the files here beside their contents: an episode can make millions of empty ones."""
    with open("/proc/self/mounts", "rb") as file:
        mounts = [line.split(b" ") for line in file]
    places = [mount[1] for mount in mounts if mount[2] == b"tmpfs"]
    found = [os.statvfs(place.decode("unicode_escape").encode("latin-1")) for place in places]  # a space is \\040
    return INODE_BYTES * sum(place.f_files - place.f_ffree for place in found)


def kill_all() -> None:
    """End every other process of the sandbox, and wait until it is gone."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    reap(0)


def reap(flags: int) -> bool:
    """Wait for processes that have ended; return False where no other is left."""
    try:
        while os.waitpid(-1, flags)[0]:
            pass
    except ChildProcessError:
        return False
    return True


main()
