"""Agents that are programs: one process for each trajectory, ended with all that it has started."""

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
"""Last bytes of each of a command's two outputs, and first ones of its result, that are kept."""
RESULT = "MEGARL_RESULT"
"""Variable with the file for a command's result as JSON: on stdout, what the policy wrote could be taken for one."""
MARK = "MEGARL_AGENT"
"""Variable by whose value all processes of a trajectory's command are found, whatever session they are in."""
DRAIN_S = 2.0
"""Seconds for what a command had written before it ended; a process that cannot be ended may hold its output open."""
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM",
    "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that every command gets beside those of ``rollout.agent_env``; none holds a secret."""


class CommandOutput(asyncio.SubprocessProtocol):
    """The end of a process, and the last bytes of its outputs."""

    def __init__(self) -> None:
        self._kept = {1: b"", 2: b""}
        self._open = {1, 2}
        self.ended = asyncio.Event()
        """The process has ended."""
        self.drained = asyncio.Event()
        """Nobody holds its outputs open."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the last bytes."""
        self._kept[fd] = (self._kept[fd] + data)[-OUTPUT_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._open.discard(fd)
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        """The process has ended; what it has started may go on."""
        self.ended.set()

    def text(self, fd: int) -> str:
        """Last text of an output: 1 is stdout, 2 stderr."""
        return self._kept[fd].decode(errors="replace")


async def run_command(
    words: Sequence[str], given: Mapping[str, Any], env: Mapping[str, str], sandbox: CommandSandbox | None = None
) -> Any:
    """Run a command that reads ``given`` as JSON, and return its result; None where it writes none.

    The command ends with its first process: what that has left behind is killed, and nobody waits for its output. In a
    sandbox it finds the endpoint of ``env`` under the same address.
    Raises RuntimeError for an exit status, OSError for a command that is not there, ValueError for a result that is no
    JSON.
    """
    mark = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="megarl-agent-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):

        def memory(name: str, content: bytes = b"") -> int:
            """Descriptor of a file in memory, to be read from its begin."""
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
            stdin=memory("agent-input", json.dumps(given).encode()),  # no pipe: a command need not read it
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
    """Name of the signal that ended a process, or what a shell or sandbox ran; None for an end of its own."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _result(path: Path) -> Any:
    """Value in a command's file; None without one. Raises OSError for a link, ValueError for what is no JSON."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        return json.loads(file.read(OUTPUT_BYTES))


async def _end(transport: asyncio.SubprocessTransport, output: CommandOutput, mark: str) -> None:
    """Kill all that a command has started, and read what is left of its output."""
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
    """Variables of this process that programs of others get: ``PASSED``, those of ``names``, and ``NO_PROXY`` with this
    machine."""
    own = {name: os.environ[name] for name in (*PASSED, *names) if name in os.environ}
    return {**own, **with_loopback(own)}


def command_environment(base_url: str, names: Sequence[str]) -> dict[str, str]:
    """Variables of a command: those of ``passed_variables`` with ``rollout.agent_env``, and the endpoint of both
    protocols."""
    return {
        **passed_variables(names),
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "none",
    }
