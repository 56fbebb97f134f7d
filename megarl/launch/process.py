"""One child process of a job: its own process group, a log file, and death with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
TAIL_LINES = 20


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the supervisor is gone, however it went: no orphans after kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A running process; everything it prints goes to ``log`` and, with ``echo``, to this terminal as well."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, *, echo: bool = False
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._tail: deque[bytes] = deque(maxlen=400)
        self._process = subprocess.Popen(
            list(argv),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._pump, args=(echo,), daemon=True)
        self._reader.start()

    def _pump(self, echo: bool) -> None:
        assert self._process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            # Raw chunks, not lines: a progress bar redraws its line with carriage returns.
            while chunk := os.read(self._process.stdout.fileno(), 65536):
                log.write(chunk)
                self._tail.append(chunk)
                if echo:
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        """Its last lines, as it printed them."""
        self._reader.join(timeout=2)
        text = b"".join(self._tail).decode(errors="replace").replace("\r", "\n")
        return "\n".join([line for line in text.splitlines() if line.strip()][-TAIL_LINES:])

    def signal(self, number: int) -> None:
        """Send a signal to the process itself; SIGKILL goes to its whole group."""
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            elif self.poll() is None:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """True when it ended within ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
