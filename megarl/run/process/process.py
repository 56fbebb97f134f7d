"""One child process of a job: it has a process group and a log file, and ends when its parent dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megarl.core.jobs import kind_of
from megarl.core.processes import heartbeat
from megarl.core.processes.fork import Forked
from megarl.core.processes.machine import kill_group
from megarl.core.processes.parent import die_with
from megarl.run.process.forkserver import ForkServers
from megarl.run.process.liveness import Probe
from megarl.run.process.stacks import ProcessHeartbeat, state_of

TAIL_BYTES = 65536
TAIL_LINES = 20
ECHO_S = 0.1
ERROR = re.compile(r"(^|\s)[\w.]*(Error|Exception): \S")
"""The last line of a traceback, after any prefix of a logger."""


class Child:
    """A running process that prints into ``log``, and with ``echo`` also on this terminal.

    The process has the log file open, not a pipe to us, so it can print after we have ended. The descriptors ``keep``
    stay open in it. ``memory`` has the heartbeat of a megarl process. The process is forked from ``servers`` if they
    have a server for its kind.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        echo: bool = False,
        keep: Sequence[int] = (),
        servers: ForkServers | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.segments: set[Path] = set()
        """Shared memory segments that the process is known to have made, for ``Node.note``."""
        self.folder: Path | None = None
        """Temporary folder of the process, removed after its end."""
        self.memory = heartbeat.Memory()
        self.probe: Probe | None = None
        """Probe of an engine, which has no heartbeat of its own."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self.process = self._start_process(argv, {**os.environ, **env}, output.fileno(), keep, servers)
            """Handle of the process: forked by a fork server, or started here."""
        self._echo = threading.Thread(target=self._show, daemon=True) if echo else None
        if self._echo is not None:
            self._echo.start()

    def _start_process(
        self, argv: Sequence[str], env: Mapping[str, str], output: int, keep: Sequence[int], servers: ForkServers | None
    ) -> subprocess.Popen[bytes] | Forked:
        memory = self.memory.descriptor
        server = servers and servers.of(kind_of(self.name))
        if server and argv[0] == sys.executable:
            pid = server.fork(argv[1:], env, output, {heartbeat.VARIABLE: memory}, keep)
            if pid is not None:
                return Forked(pid)
        return subprocess.Popen(
            list(argv),
            env={**env, heartbeat.VARIABLE: str(memory)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
            pass_fds=[*keep, memory],
        )

    def _show(self) -> None:
        with self.log.open("rb", buffering=0) as log:
            log.seek(self._start)
            while True:
                ended = self.poll() is not None  # before reading, so that the last output is read below
                # Raw chunks, not lines: a progress bar redraws its line with carriage returns.
                while chunk := log.read(TAIL_BYTES):
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()
                if ended:
                    return
                time.sleep(ECHO_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self.process.poll()

    def tail(self) -> str:
        """Return the log's last lines; before them the first recent exception, if more output has followed it."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError as error:
            return f"(its log is gone: {error.strerror})"
        first = next((i for i, line in enumerate(lines) if ERROR.search(line)), len(lines))
        cause = [lines[first], "..."] if first < len(lines) - TAIL_LINES else []
        return "\n".join([*cause, *lines[-TAIL_LINES:]]) or "(it printed nothing)"

    def last_output_at(self) -> float:
        """Return the time of the last output, in Unix seconds; now, if the log is gone."""
        try:
            return self.log.stat().st_mtime
        except OSError:
            return time.time()

    def heartbeat(self) -> ProcessHeartbeat:
        """Return the process's current heartbeat."""
        if self.probe is not None:
            return ProcessHeartbeat(
                self.probe.count, 0, 0, 0.0, "serving" if self.probe.count else heartbeat.START, self.probe.state
            )
        found = self.memory.read()
        return ProcessHeartbeat(found.beats, found.work, found.step, found.timeout_s, found.phase, state_of(self.pid))

    def signal(self, number: int) -> None:
        """Send a signal to the process itself; SIGKILL goes to its whole group."""
        try:
            if number == signal.SIGKILL:
                kill_group(self.pid)
            elif self.poll() is None:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Return True if the process ended within ``timeout_s``; its output has then been shown."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._echo is not None:
            self._echo.join(timeout=2)
        return True
