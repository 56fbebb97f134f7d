"""``megarl`` commands forked from a process that has imported, once, all that they and their processes import.

A start by itself imports for 25 seconds of CPU; most tests of jobs are about what comes after. The command is the same
code with the same supervision: ``ForkServers`` makes its engines and ranks as it does for a user, only that their
modules are there already. Tests in which the start is the point (``tests/system/test_wheel.py``, Slurm's jobs) and
``.ci/run`` itself start commands by themselves.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.core.processes.fork import Forked, ForkServer
from megarl.exam.processes import ENVIRONMENT, MODULES

VARIABLE = "MEGARL_TEST_COMMANDS"
"""Variable that is 0 to start each command by itself."""


class Command(Forked):
    """A command, with the methods of ``subprocess.Popen`` that tests use."""

    def wait(self, timeout: float = 3600.0) -> int:
        return super().wait(timeout)


_servers: list[ForkServer] = []


def server() -> ForkServer:
    """The fork server, another one where that did not answer: a test may have killed it."""
    if not _servers or _servers[-1].closed:
        process = ForkServer.start(MODULES, {**os.environ, **ENVIRONMENT})
        atexit.register(process.close)
        _servers.append(process)
    return _servers[-1]


def start(argv: Sequence[str], env: Mapping[str, str], output: int) -> Command | None:
    """Fork ``python ARGV``; None where it is to start by itself. It is sent SIGTERM when pytest ends.

    Fails the test where its environment has what imports may read: a library that a test has imported or compiled with
    has set a variable of pytest's process, and every later command would start by itself.

    Args:
        output: Descriptor of its stdout and stderr.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    process, env = server(), {**env, **ENVIRONMENT}
    pid = process.fork(argv, env, output, {})
    if pid is None:
        assert process.closed, f"other variables than the server's: {sorted(process.differing(env))}"
    return None if pid is None else Command(pid)


def run(argv: Sequence[str], log: Path, timeout: float = 300.0) -> tuple[int, str]:
    """Run ``python ARGV`` to its end, forked where that is possible; return its status, and what it has printed."""
    with log.open("wb") as output:
        process: Command | subprocess.Popen[bytes] | None = start(argv, dict(os.environ), output.fileno())
        process = process or subprocess.Popen([sys.executable, *argv], stdout=output, stderr=subprocess.STDOUT)
    return process.wait(timeout), log.read_text()
