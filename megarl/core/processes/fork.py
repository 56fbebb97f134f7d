"""Fork processes from a server that has already imported the modules they need.

A forked process becomes a child of the caller, as with ``subprocess``, so the fork server may end before it. Some
environment variables are read only at import. So a process that differs in variables other than ``LATE`` is not forked.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from megarl.core.processes.machine import die_with
from megarl.core.processes.secrets import hide_secrets, show_as

log = logging.getLogger(__name__)

LATE = (
    "MEGARL_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TMPDIR", "VLLM_RPC_BASE_PATH", "VLLM_HOST_IP",
    "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "GLOO_", "NCCL_", "TP_SOCKET_IFNAME",
    "PYTEST_CURRENT_TEST", "NO_PROXY", "no_proxy",
)  # fmt: skip
"""Prefixes of variables that no import reads."""
MESSAGE_BYTES = 2**18
READY = b"imported"
START_S = 120.0
"""Timeout in seconds of a fork server's imports and of a fork, generous for a very busy machine."""
ADOPTED_S = 10.0
LOOK_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that its supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Exit status, negative for a signal; ``None`` while the process runs."""
        with self._reaping:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def wait(self, timeout: float) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(LOOK_S)
        return status


class ForkServer:
    """Client of a process to fork from.

    Args:
        requests: Socket to the server.
        environment: Environment of the server's imports.
        process: The server, if ``start`` started it.
    """

    def __init__(
        self, requests: socket.socket, environment: Mapping[str, str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._requests: socket.socket | None = requests
        self._environment = environment
        self._process = process
        self._one_at_a_time = threading.Lock()
        self.imported = False
        """True once the server was ready to fork."""
        requests.settimeout(START_S)

    @classmethod
    def start(cls, modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        """Start a server that ends with the calling thread."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            process = subprocess.Popen(
                [sys.executable, "-c", "from megarl.core.processes import fork; fork.main()",
                 str(os.getpid()), str(there.fileno()), *modules],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )  # fmt: skip
        return cls(here, dict(environment), process)

    @property
    def closed(self) -> bool:
        return self._requests is None

    def await_imports(self) -> bool:
        """Wait until the server can fork; False if it has ended."""
        with self._one_at_a_time:
            if not self.imported and self._requests is not None:
                with suppress(OSError):
                    self.imported = self._requests.recv(64) == READY
            return self.imported

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: int,
        passed: Mapping[str, int],
        keep: Sequence[int] = (),
        *,
        session: bool = True,
    ) -> int | None:
        """Fork a child of this process that runs ``python ARGV``. Return its process id, or ``None`` on failure.

        Args:
            env: Complete environment of the child.
            output: Descriptor of its stdout and stderr.
            passed: Variable name -> descriptor; the child finds the descriptor's number in the variable.
            keep: Other descriptors that stay open in the child.
            session: Make the child the leader of a session, not only of a process group.
        """
        others = self.differing(env)
        if others or list(argv[:1]) != ["-m"]:
            log.debug("%s is started, not forked: %s differ", argv, ", ".join(sorted(others)))
            return None
        message = json.dumps(
            [list(argv), dict(env), os.getcwd(), list(passed), os.getpid(), _ignored(), session]
        ).encode()
        ready = self.await_imports()
        with self._one_at_a_time, _adopting():
            if self._requests is None:
                return None
            try:
                if ready:
                    socket.send_fds(self._requests, [message], [output, *passed.values(), *keep])
                    pid = int(self._requests.recv(64) or 0)
                    if pid and _is_child(pid):
                        return pid
                    log.debug("%s is started, not forked: process %d is no child of this one", argv, pid)
            except (OSError, ValueError) as error:
                log.debug("%s is started, not forked: %s", argv, error)
        self.close()  # it has died, or children cannot be adopted here
        return None

    def differing(self, env: Mapping[str, str]) -> set[str]:
        """Names of variables that differ from the environment of the server's imports, without ``LATE`` ones."""
        names = {name for name in {*env, *self._environment} if env.get(name) != self._environment.get(name)}
        return {name for name in names if not name.startswith(LATE)}

    def close(self) -> None:
        """End the server; forked processes keep running."""
        with self._one_at_a_time:
            if self._requests is not None:
                self._requests.close()
            self._requests = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class ForkRoot:
    """A process forked from this one. It forks fork servers with different imports.

    The root and its servers end with this process's main thread, or with ``close``. Create it before any threads.

    Args:
        modules: Modules to import once for all servers.
        variables: Changes to this process's environment for these imports.
    """

    def __init__(self, modules: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType({})) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if os.fork() == 0:
            here.close()
            _serve_as(parent, partial(_serve_servers, there, modules, variables))
        there.close()
        self._requests = here

    def server(self, modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer | None:
        """Start a server that imports ``modules`` in ``environment``; ``None`` if this root has ended."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, suppress(OSError):
            message = json.dumps([list(modules), dict(environment)]).encode()
            socket.send_fds(self._requests, [message], [there.fileno()])
            return ForkServer(here, dict(environment))
        here.close()
        return None

    def close(self) -> None:
        """End the root and its servers; forked processes keep running."""
        self._requests.close()


def _serve_as(parent: int, serve: Callable[[], None]) -> NoReturn:
    """Run a server in a forked process, silently: a caller that cannot fork starts a process, which shows the error."""
    status = 1
    with suppress(BaseException):
        die_with(parent, signal.SIGKILL)
        ignore_ends()
        show_as([sys.executable, "-m", __name__], os.environ)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        for handler in list(logging.root.handlers):
            logging.root.removeHandler(handler)
        logging.root.setLevel(logging.WARNING)
        serve()
        status = 0
    os._exit(status)


def _serve_servers(requests: socket.socket, modules: Sequence[str], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        if not message:
            return
        wanted, environment = json.loads(message)
        own, parent = socket.socket(fileno=descriptors[0]), os.getpid()
        if os.fork() == 0:
            requests.close()
            _serve_as(parent, partial(serve, own, wanted, environment))
        own.close()


_adoption = threading.Lock()
_adopters = 0
"""Number of threads that fork now, each from a separate server; the subreaper flag is set for the whole process."""


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of descendants whose parent ends."""
    _adopt(1)
    try:
        yield
    finally:
        _adopt(-1)


def _adopt(change: int) -> None:
    global _adopters
    with _adoption:
        _adopters += change
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(_adopters > 0))


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


loaded_with: list[str] = []
"""``OMP_NUM_THREADS`` at the time of the torch import in the fork server of this process; empty if not forked."""


def main() -> None:
    """Run the server that ``ForkServer.start`` has started."""
    parent, descriptor, *modules = sys.argv[1:]
    hide_secrets()
    die_with(int(parent), signal.SIGKILL)
    ignore_ends()
    requests = socket.socket(fileno=int(descriptor))
    requests.set_inheritable(False)
    serve(requests, modules, dict(os.environ))


def ignore_ends() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP: the process that forks decides when its server ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def serve(requests: socket.socket, modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Import ``modules`` in ``environment``, then fork on request until the socket's other end is closed."""
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.config.disable = True  # its import has read the variable
    gc.disable()  # collections during imports take a fifth of the time
    for name in modules:
        importlib.import_module(name)
    if "torch" in sys.modules:
        loaded_with[:] = [environment.get("OMP_NUM_THREADS", "")]
    # Variables set by imports, which a fresh process would have too.
    imported = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    if threading.active_count() > 1:
        return  # locks of those threads would stay locked in a fork
    leave_libraries()
    gc.collect()
    gc.freeze()
    gc.enable()  # in forked processes
    requests.send(READY)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MESSAGE_BYTES, 16)
        if not message:
            return
        argv, env, folder, passed, launcher, ignored, session = json.loads(message)
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            own = os.getpid()
            if os.fork() == 0:
                os.close(reader)
                requests.close()
                _be_child_of(launcher, own, ignored, session)
                os.write(writer, str(os.getpid()).encode())
                os.close(writer)
                numbers = {name: str(number) for name, number in zip(passed, descriptors[1:], strict=False)}
                _become(argv, {**env, **imported, **numbers}, folder, *descriptors)
            os._exit(0)
        os.waitpid(between, 0)  # from here on the launcher is the child's parent
        os.close(writer)
        requests.send(os.read(reader, 64))  # empty if the child has ended
        for descriptor in (reader, *descriptors):
            os.close(descriptor)


def leave_libraries() -> None:
    """Let forked processes end without deregistering the operators of imported libraries: 0.2 s of CPU each."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek() if finalizer.atexit else None
        if found is not None and found[1].__module__ == "torch.library":
            finalizer.atexit = False


def _ignored() -> list[int]:
    """Signals that this process ignores, and a program that it starts would therefore ignore."""
    return [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]


def _be_child_of(launcher: int, between: int, ignored: Sequence[int], session: bool) -> None:
    """Wait until the launcher is the parent, then lead a process group, so that the launcher can signal it as a child.

    Args:
        ignored: Signals that the launcher ignores now; the server may have been forked with others.
    """
    if session:
        os.setsid()
    else:
        os.setpgid(0, 0)
    end = time.monotonic() + ADOPTED_S
    while os.getppid() == between and time.monotonic() < end:
        time.sleep(0.0005)
    die_with(launcher, signal.SIGTERM)
    for number in signal.valid_signals():
        with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # Python ignores these three


def _become(argv: list[str], env: dict[str, str], folder: str, output: int, *others: int) -> NoReturn:
    """Run ``python ARGV`` in this forked process as if started that way, then exit."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for descriptor in others:
        os.set_inheritable(descriptor, True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in env)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    tempfile.tempdir = None
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    show_as([sys.executable, *argv], os.environ)
    sys.path[0] = folder
    sys.argv = [argv[1], *argv[2:]]
    os._exit(_run(argv[1]))


def _run(module: str) -> int:
    """Run ``python -m MODULE`` and return its exit status."""
    status: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return (status or 0) & 0xFF
