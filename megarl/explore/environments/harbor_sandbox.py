"""Sandbox of one Harbor task: bubblewrap with the system's programs, read-only, and the task's files."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError, SandboxError
from megarl.sandbox import bubblewrap
from megarl.sandbox.bubblewrap import INSIDE_UID, LOOKUPS, as_they_are
from megarl.sandbox.host import find
from megarl.sandbox.interface import MIB
from megarl.tasks.harbor import TESTS_MB, HarborTask

PROGRAM = Path(__file__).with_name("harbor_inside.py").read_text()
STARTER = ThreadPoolExecutor(1, thread_name_prefix="harbor")
"""Thread that starts all sandboxes: a sandbox ends with its starting thread, and an episode's calls use several
threads."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib32")
HOME = "/root"
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": HOME, "LANG": "C.UTF-8"}
TESTS_ENVIRONMENT = {**ENVIRONMENT, "PYTHONNOUSERSITE": "1"}
"""Hides modules that an episode put in ``HOME``, which Python would run first."""
LOG_MB = 256
REPLY_S = 20.0
"""Seconds added to a request's limit, for the sandbox's start, its files and killing processes."""
PROVE_S = 20.0
PROBE = "test ! -e {} && test $(grep -c : /proc/net/dev) -le 1 && test $(ls -d /proc/[0-9]* | wc -l) -le 8"
"""Fails if a program sees a file, the network or processes of this machine."""


class HarborSandbox:
    """Files and processes of one episode. Raises SandboxError if the sandbox fails."""

    def __init__(self, task: HarborTask) -> None:
        self._task = task
        self._link, inside = socket.socketpair()
        with inside:
            self.process = STARTER.submit(self._start, inside).result()
            """Process of the sandbox."""
        self._lines = self._link.makefile("rwb")
        self._files = files_of(task.copies)

    def run(self, command: str, seconds: float, most: int) -> dict[str, Any]:
        """Run a shell command in the task's folder: returns ``output``, at most ``most`` bytes; ``limit``, ``time`` or
        ``memory`` if killed; ``seconds``."""
        files, self._files = self._files, b""
        return self._ask("run", seconds, files, most=most, command=command, env={**ENVIRONMENT, **self._task.env})

    def tests(self, seconds: float, most: int) -> dict[str, Any]:
        """Kill all processes and run the task's tests; returns as ``run``, with ``reward`` and its ``file``."""
        if self._files:
            self.run("true", seconds, most)
        env = {**TESTS_ENVIRONMENT, **self._task.env, **self._task.verifier_env}
        files = files_of([(self._task.folder / "tests", "/")])
        return self._ask("tests", seconds, files, most=most, env=env)

    def kill(self) -> None:
        """Kill the sandbox; a waiting call raises."""
        self.process.kill()

    def close(self) -> None:
        """Kill the sandbox and wait for its end."""
        self.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._lines.close()
        self._link.close()

    def _ask(self, do: str, seconds: float, files: bytes, **given: Any) -> dict[str, Any]:
        asked = {"do": do, "size": len(files), "seconds": seconds, "cwd": self._task.workdir}
        head = json.dumps({**asked, "memory": self._task.memory_mb * MIB, **given})
        self._link.settimeout(seconds + REPLY_S)
        try:
            self._lines.write(head.encode() + b"\n" + files)
            self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            line, why = b"", str(error)
        else:
            why = "it has ended"
        if not line:
            self.kill()
            words = bubblewrap.last_words(self.process)
            raise SandboxError(f"the sandbox of {self._task.folder} does not reply: {why} {words}".strip())
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self, inside: socket.socket) -> subprocess.Popen[bytes]:
        task, host, link = self._task, find(), inside.fileno()
        own = {f"/{place.split('/')[1]}" for place in (task.workdir, *(place for _, place in task.copies))}
        sizes = dict.fromkeys(sorted({*own, HOME, "/tmp"}), task.storage_mb) | {"/logs": LOG_MB, "/tests": TESTS_MB}
        with bubblewrap.filter_pipe(host.filter) as filter_fd:
            words = bubblewrap.command(
                host.bwrap, ["/python/bin/python3", "-S", "-s", "-c", PROGRAM, str(link)], shown=_shown(),
                writable={place: mb * MIB for place, mb in sizes.items()}, filter_fd=filter_fd,
            )  # fmt: skip
            return bubblewrap.start(words, [link, filter_fd], host.user)


def shown(path: Path) -> str | None:
    """Return the folder of this machine that contains ``path`` and is visible in every sandbox; None without one."""
    sources = [source for option, source in pairwise(_shown()) if option in ("--ro-bind", "--ro-bind-try")]
    return next((source for source in sources if path.resolve().is_relative_to(Path(source).resolve())), None)


def _shown() -> list[str]:
    """Return bwrap's arguments that mount the system's programs and our interpreter."""
    return [*as_they_are(SYSTEM), *LOOKUPS, *find().binds]


def files_of(copies: Iterable[tuple[Path, str]]) -> bytes:
    """Return a tar file of files and folders at their places; links stay links."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        for source, place in copies:
            files.add(source, place.strip("/") or ".", filter=_anyones)
    return packed.getvalue()


def _anyones(file: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a file owned and writable by the user inside."""
    file.uid = file.gid = INSIDE_UID
    file.uname = file.gname = ""
    file.mode |= 0o700 if file.isdir() else 0o600
    return file


def prove() -> None:
    """Raise ConfigError unless a sandbox starts and hides files, network and processes of this machine."""
    with tempfile.NamedTemporaryFile() as secret:
        task = HarborTask(Path("/"), "", "/app", (), PROVE_S, PROVE_S, 1024, 64, {}, {})
        try:
            sandbox = HarborSandbox(task)
            try:
                done = sandbox.run(f"{PROBE.format(secret.name)} && echo hidden", PROVE_S, 4096)
            finally:
                sandbox.close()
        except SandboxError as error:
            raise ConfigError(f"rollout.environment=harbor: {error}") from error
    if done["output"] != "hidden\n":
        raise ConfigError(
            f"rollout.environment=harbor: bubblewrap does not hide this machine here ({done['output'].strip()})"
        )
