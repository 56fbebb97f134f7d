"""Agents that are programs: one process for each trajectory, killed with all its descendants."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.core.processes.machine import kill_group, kill_marked
from megarl.explore.agents.loopback import with_loopback
from megarl.explore.agents.sandbox import RESULT_FILE, CommandSandbox
from megarl.sandbox import seccomp

OUTPUT_BYTES = 64 * 2**10
"""Bytes kept of a command: the last of each output, the first of its result."""
RESULT = "MEGARL_RESULT"
"""Variable with the file for a command's JSON result. On stdout, text of the policy could pass for a result."""
MARK = "MEGARL_AGENT"
"""Variable that marks all processes of a trajectory's command, in any session."""
DRAIN_S = 2.0
"""Timeout in seconds to drain a command's output after its end; an unkillable process may hold it open."""
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM",
    "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that every command gets in addition to ``rollout.agent_env``; none contains a secret."""


class CommandOutput(asyncio.SubprocessProtocol):
    """Waits for the end of a process and keeps the last bytes of its outputs."""

    def __init__(self) -> None:
        self._kept = {1: b"", 2: b""}
        self._open = {1, 2}
        self.ended = asyncio.Event()
        """Set when the process has ended."""
        self.drained = asyncio.Event()
        """Set when both outputs are closed."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the last bytes."""
        self._kept[fd] = (self._kept[fd] + data)[-OUTPUT_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Mark the output as closed."""
        self._open.discard(fd)
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        """Mark the process as ended; its descendants may still run."""
        self.ended.set()

    def text(self, fd: int) -> str:
        """Return the last text of an output: 1 is stdout, 2 stderr."""
        return self._kept[fd].decode(errors="replace")


async def run_command(
    words: Sequence[str], given: Mapping[str, Any], env: Mapping[str, str], sandbox: CommandSandbox | None = None
) -> Any:
    """Run a command that reads ``given`` as JSON, and return its result, or None.

    The command ends with its first process; remaining processes are killed. In a sandbox the endpoint of ``env`` has
    the same address. Raises RuntimeError for a non-zero exit status, OSError for a missing command, ValueError for a
    result that is not JSON.
    """
    mark = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="megarl-agent-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):

        def memory(name: str, content: bytes = b"") -> int:
            """Return the descriptor of an in-memory file, at its start."""
            descriptor = os.memfd_create(name)
            stack.callback(os.close, descriptor)
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)
            return descriptor

        result, started, passed = Path(folder, "result.json"), list(words), list[int]()
        place = str(result)
        if sandbox is not None:
            port = urlsplit(env["ANTHROPIC_BASE_URL"]).port
            assert port is not None
            passed = [memory("agent-filter", seccomp.program()), memory("agent-result")]
            started, place = sandbox.command(words, port, passed[0], passed[1], OUTPUT_BYTES), RESULT_FILE
        transport, output = await asyncio.get_running_loop().subprocess_exec(
            CommandOutput,
            *started,
            stdin=memory("agent-input", json.dumps(given).encode()),  # no pipe: a command need not read its input
            env={**env, MARK: mark, RESULT: place},
            start_new_session=True,
            pass_fds=passed,
        )
        try:
            await output.ended.wait()
        finally:
            await _end(transport, output, mark)
        if status := transport.get_returncode():
            if name := _killer(status):  # its last line need not tell why
                raise RuntimeError(f"{words[0]} was killed by {name}")
            last = output.text(2).strip().rpartition("\n")[2]
            raise RuntimeError(f"{words[0]} ended with status {status}: {last}")
        if sandbox is None:
            return _result(result)
        written = os.pread(passed[1], OUTPUT_BYTES + 1, 0)
        return json.loads(written[1:]) if written else None


def _killer(status: int) -> str | None:
    """Return the name of the signal that killed a process, or a shell's or sandbox's child; None for a normal end."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _result(path: Path) -> Any:
    """Return the value in a command's result file; None without one. Raises OSError for a link, ValueError for invalid
    JSON."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        return json.loads(file.read(OUTPUT_BYTES))


async def _end(transport: asyncio.SubprocessTransport, output: CommandOutput, mark: str) -> None:
    """Kill all processes of a command, and read the rest of its output."""
    await asyncio.to_thread(_kill, transport.get_pid(), f"{MARK}={mark}")
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await output.ended.wait()
            await output.drained.wait()
    transport.close()


def _kill(group: int, mark: str) -> None:
    kill_group(group)
    kill_marked(mark)


def passed_variables(names: Sequence[str] = ()) -> dict[str, str]:
    """Return this process's variables for third-party programs: ``PASSED``, ``names``, and ``NO_PROXY`` with this
    machine."""
    own = {name: os.environ[name] for name in (*PASSED, *names) if name in os.environ}
    return {**own, **with_loopback(own)}


def command_environment(base_url: str, names: Sequence[str]) -> dict[str, str]:
    """Return a command's variables: ``passed_variables`` of ``rollout.agent_env``, and the endpoint for both
    protocols."""
    return {
        **passed_variables(names),
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "none",
    }
