"""Sandbox of commands: bubblewrap with the system's programs, the agent's folder and the endpoint only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import ConfigError
from megarl.sandbox import bubblewrap
from megarl.sandbox.bubblewrap import ALLOWED_BY, LOOKUPS, as_they_are

INSIDE = Path(__file__).with_name("inside.py")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
ENDPOINT, FIRST = "/run/endpoint", "/run/inside.py"
RESULT_FILE = "/tmp/megarl_result.json"
"""Path of a command's result, in its private /tmp."""
TMP_BYTES, SHM_BYTES = 2**30, 2**26
"""Sizes in bytes of a command's /tmp and working folder (each), and of its /dev/shm."""
PROVE_S = 60.0
PROBE = """
import os, socket, sys
secret, port = sys.argv[1:]
found = []
if os.path.exists(secret):
    found.append("files of this machine")
try:
    socket.create_connection(("127.0.0.1", int(port)), 2)
    found.append("its network")
except OSError:
    pass
if len([name for name in os.listdir("/proc") if name.isdigit()]) > 3:
    found.append("its processes")
print(", ".join(found))
"""
FIX = (
    f"it needs bubblewrap and unprivileged user, pid and network namespaces ({ALLOWED_BY}), or set "
    "rollout.agent_sandbox=false"
)


@dataclass(frozen=True)
class CommandSandbox:
    """Sandbox of an agent's commands; one for all trajectories."""

    bwrap: str
    shown: tuple[Path, ...]
    """Files and folders mounted read-only at the same path."""
    endpoint: Path | None
    """UNIX socket of the endpoint; None for a check alone."""

    @classmethod
    def of(cls, words: Sequence[str], paths: Sequence[str], endpoint: Path | None) -> CommandSandbox:
        """Make a sandbox for a command line: with its programs, the folders of its files, and ``paths``.

        Raises ConfigError if bubblewrap or a path is missing, or a mounted folder contains the user's home.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError(f"rollout.agent_sandbox=true, but bwrap is not on the PATH: {FIX}")
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            raise ConfigError(f"rollout.agent_paths={list(paths)}: {missing[0]} does not exist")
        own = [_folder(Path(word)) for word in words if os.path.exists(word)]
        named = [*own, *(Path(path).absolute() for path in paths)]
        shown = [*_interpreter(Path(sys.executable)), *_interpreter(Path(shutil.which(words[0]) or words[0])), *named]
        home = Path.home().resolve()
        for path in shown:
            if home.is_relative_to(path.resolve()):
                raise ConfigError(
                    f"rollout.agent_sandbox=true would show all of {path} to the command {' '.join(words)!r}; put the "
                    "agent, or its interpreter, into a separate folder"
                )
        return cls(bwrap, tuple(dict.fromkeys(path for path in shown if not _of_system(path))), endpoint)

    def command(self, words: Sequence[str], port: int, filter_fd: int, result_fd: int, most: int) -> list[str]:
        """Return the command line that runs ``words`` inside.

        Args:
            port: Port of the endpoint on loopback, the same inside and outside.
            filter_fd: Descriptor from which the filter of system calls is read.
            result_fd: Descriptor to which ``inside.py`` writes the command's ``RESULT_FILE``.
            most: Most bytes of the result.
        """
        assert self.endpoint is not None
        binds = ["--ro-bind", str(self.endpoint), ENDPOINT, "--ro-bind", str(INSIDE), FIRST]
        first = [sys.executable, "-I", "-S", FIRST, ENDPOINT, str(port), str(result_fd), str(most)]
        return self._bwrap([*first, *words], binds, filter_fd)

    def prove(self, run_dir: Path) -> None:
        """Raise ConfigError if a program inside sees files, network or processes of this machine, or the run's
        directory."""
        for path in (*map(Path, SYSTEM), *self.shown):
            if run_dir.resolve().is_relative_to(path.resolve()):
                raise ConfigError(
                    f"rollout.agent_sandbox=true would show run.dir={run_dir} to the agent, with {path}; put them into "
                    "folders of their own"
                )
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
            secret = Path(folder, "secret")
            secret.touch()
            port = str(listening.getsockname()[1])
            words = [sys.executable, "-I", "-S", "-c", PROBE, str(secret), port]
            try:
                done = subprocess.run(self._bwrap(words), capture_output=True, text=True, timeout=PROVE_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ConfigError(
                    f"rollout.agent_sandbox=true, but {self.bwrap} does not run: {error}; {FIX}"
                ) from error
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"rollout.agent_sandbox=true, but a program does not run in it: {last}; {FIX}")
        if seen := done.stdout.strip():
            raise ConfigError(f"rollout.agent_sandbox=true, but a program in it sees {seen}; {FIX}")

    def _bwrap(self, words: Sequence[str], binds: Sequence[str] = (), filter_fd: int | None = None) -> list[str]:
        work = os.getcwd()
        empty = work != "/" and not _of_system(Path(work))  # mounted at / it would hide everything
        own = [word for path in self.shown for word in ("--ro-bind", str(path), str(path))]
        return bubblewrap.command(
            self.bwrap, words, shown=[*as_they_are(SYSTEM), *LOOKUPS],
            writable=dict.fromkeys(["/tmp", work] if empty else ["/tmp"], TMP_BYTES), on_top=[*own, *binds],
            variables={"HOME": "/tmp", "TMPDIR": "/tmp"}, inherits=True, shm_bytes=SHM_BYTES,
            folder=work, filter_fd=filter_fd,
        )  # fmt: skip


def _folder(path: Path) -> Path:
    """Return the folder of a file, which may contain its modules; a folder itself."""
    path = path.absolute()
    return path if path.is_dir() else path.parent


def _interpreter(program: Path) -> Iterator[Path]:
    """Yield the paths that a program needs: an interpreter's virtual environment and installation, else the file."""
    environment = program.parent.parent
    if (environment / "pyvenv.cfg").is_file():
        yield environment
    real = program.resolve()
    yield real.parent.parent if real.name.startswith("python") and real.parent.name == "bin" else real


def _of_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SYSTEM)
