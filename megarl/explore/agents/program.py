"""Agents that megarl starts: a function in a user's file, or a program for each trajectory in a sandbox."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError, describe
from megarl.core.imports import import_file
from megarl.core.processes.machine import kill_group, kill_marked
from megarl.core.schema import Task
from megarl.explore.agents.request import prompt_of
from megarl.sandbox import bubblewrap
from megarl.sandbox.bubblewrap import ALLOWED_BY, LOOKUPS, as_they_are

HOSTS = ("127.0.0.1", "localhost")
NAMES = ("NO_PROXY", "no_proxy")
"""Both spellings are in use; most libraries prefer the lower-case one if both are set."""


def with_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``NO_PROXY`` under both names: the values of both, and this machine's hosts."""
    hosts = ",".join(environment.get(name, "") for name in NAMES).split(",")
    value = ",".join(dict.fromkeys(host.strip() for host in (*hosts, *HOSTS) if host.strip()))
    return dict.fromkeys(NAMES, value)


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
            passed = [memory("agent-filter", bubblewrap.program()), memory("agent-result")]
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


log = logging.getLogger(__name__)

Run = Callable[[str, Task, dict[str, Any], dict[str, Any]], Awaitable[Any]]
"""``await run(base_url, task, request_kwargs, metadata)``: the agent's result, or None to ask the verifier."""


class AgentFault(Exception):
    """An agent raised a BaseException such as SystemExit."""


def load(rollout: RolloutConfig, endpoint: Path | None = None) -> Run:
    """Load the agent of ``rollout.agent``: ``run`` of a Python file, or a command. Raises ConfigError.

    Args:
        endpoint: UNIX socket of the endpoint for commands in a sandbox.
    """
    agent = rollout.agent
    if not agent:
        raise ConfigError(
            "rollout.workflow=agent needs rollout.agent: a Python file (.py) with `async def run(base_url, prompt, "
            "request_kwargs, metadata)`, or a command line"
        )
    words = shlex.split(agent)
    if len(words) > 1 or not agent.endswith(".py"):
        return _command(words, rollout, endpoint)
    if rollout.agent_sandbox:
        raise ConfigError(
            f"rollout.agent_sandbox=true, but {agent} runs in the explorer's process; give a command line, such as "
            f"'python {agent}', or leave it out"
        )
    os.environ.update(with_loopback(os.environ))  # before the file creates its client
    wanted = "async def run(base_url, prompt, request_kwargs, metadata)"
    module = import_file(agent, "rollout.agent", wanted)
    atexit.register(vars(module).clear)  # its clients close themselves with modules that are gone later
    function = getattr(module, "run", None)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.agent={agent} has no {wanted}")
    thread = AgentThread()

    async def run(base_url: str, task: Task, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        return await thread.call(function, f"{base_url}/v1", prompt_of(task), request_kwargs, metadata)

    return run


def check(rollout: RolloutConfig, run_dir: Path) -> None:
    """Raise ConfigError unless the agent exists and its sandbox, if any, works and hides ``run_dir``."""
    load(rollout)
    if rollout.agent_sandbox:
        CommandSandbox.of(shlex.split(rollout.agent), rollout.agent_paths, None).prove(run_dir)


class AgentThread:
    """An event loop in a separate thread, so that a blocking agent blocks other agents, but not the explorer."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await a coroutine function in the thread; cancelled with the caller. Raises AgentFault."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=[self._loop], name="agents", daemon=True).start()
        future: Future[Any] = asyncio.run_coroutine_threadsafe(_contained(function, *args), self._loop)
        return await asyncio.wrap_future(future)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the agents' loop, and continue it if an agent's task calls sys.exit."""
    while True:
        try:
            loop.run_forever()
        except BaseException as error:
            log.warning("a task of an agent raised %s", describe(error))


async def _contained(function: Callable[..., Any], *args: Any) -> Any:
    """Await a function; raise AgentFault for SystemExit, and for a CancelledError raised by the agent."""
    try:
        return await function(*args)
    except Exception:
        raise
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
            raise
        raise AgentFault(describe(error)) from error


def _command(words: list[str], rollout: RolloutConfig, endpoint: Path | None) -> Run:
    sandbox = CommandSandbox.of(words, rollout.agent_paths, endpoint) if rollout.agent_sandbox else None

    async def run(base_url: str, task: Task, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        given = {"prompt": prompt_of(task), "request_kwargs": request_kwargs, "metadata": metadata}
        return await run_command(words, given, command_environment(base_url, rollout.agent_env), sandbox)

    return run
