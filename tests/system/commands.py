"""``megarl`` commands forked from a process that has imported, once, all that they and their processes import.

A start by itself imports for 25 seconds of CPU; most tests of jobs are about what comes after. The command is the same
code with the same supervision: ``ForkServers`` makes its engines and ranks as it does for a user, only that their
modules are there already. Tests in which the start is the point (``tests/system/test_wheel.py``, Slurm's jobs) and
``.ci/run`` itself start commands by themselves.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megarl.core.jobs import ProcessKind
from megarl.run.process.forkserver import COMMON, PRELOAD, Forked, ForkServer

VARIABLE = "MEGARL_TEST_COMMANDS"
"""Variable that is 0 to start each command by itself."""
MODULES = (
    *COMMON,
    *PRELOAD[ProcessKind.TRAINER],
    *PRELOAD[ProcessKind.ENGINE],
    "megarl.learn.models.from_scratch",
    "megarl.run.checks.job",
    "megarl.run.launch.job",
    "megarl.run.report.html",
    "reasoning_gym",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "megarl",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Variables of engines that vLLM may read while it is imported."""
OF_PYTEST = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
SERVE = """
import json, socket, sys
from megarl.run.process import forkserver
forkserver.serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
"""


class Command(Forked):
    """A command, with the methods of ``subprocess.Popen`` that tests use."""

    def wait(self, timeout: float = 3600.0) -> int:
        return super().wait(timeout)


@functools.cache
def _server() -> ForkServer:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = _without_pytest({**os.environ, **ENVIRONMENT})
    arguments = [str(there.fileno()), json.dumps(MODULES), json.dumps(environment)]
    with there:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVE, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
    server = ForkServer(here, environment)

    def end() -> None:
        server.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()

    atexit.register(end)
    return server


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_PYTEST}


def start(argv: Sequence[str], env: Mapping[str, str], output: int) -> Command | None:
    """Fork ``python ARGV``; None where its environment has what imports may read. It is sent SIGTERM when pytest ends.

    Args:
        output: Descriptor of its stdout and stderr.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    pid = _server().fork(argv, _without_pytest({**env, **ENVIRONMENT}), output, {}, ())
    return None if pid is None else Command(pid)
