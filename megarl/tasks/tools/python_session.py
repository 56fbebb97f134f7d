"""Python sessions of trajectories: one interpreter per trajectory in the sandbox, with variables kept between calls."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megarl.core.errors import SandboxError
from megarl.core.text import without_surrogates
from megarl.sandbox.interface import MIB, Limits
from megarl.sandbox.local import START_S, Box, LocalSandbox, read

PROGRAM = Path(__file__).with_name("session_inside.py").read_text()
LATE_S = 2.0
"""Seconds after a call's limit until a session whose code ignores interruption is killed."""
LAST_WORDS_S = 1.0
"""Seconds for the sandbox to report which limit ended a session."""
WATCH_S = 0.5
"""Seconds between polls of a session's memory, which cost CPU while the session mostly waits."""
PROCESSES = 8
LIFE_S = 10.0**6
"""Maximum lifetime of a session in seconds, longer than any trajectory."""
HEAD_BYTES, ESCAPED = 2**15, 12
"""Bytes of a reply in addition to the requested characters (for errors), and maximum JSON bytes of a character."""
GONE = "The session has ended ({}), and its variables are gone. The next call begins a new one."


class PythonSessions:
    """Sandboxes of an explorer's sessions, as many as requested: a limit could make trajectories wait for each other.
    Each is created and used by one separate thread, and would end with it.

    Args:
        calls: Maximum calls of a session; limits its CPU time.
        most: Maximum characters of a result.
    """

    def __init__(self, sandbox: LocalSandbox, memory_mib: int, timeout_s: float, calls: int, most: int) -> None:
        memory, cpu_s = memory_mib * MIB, math.ceil((timeout_s + LATE_S) * (calls + 1))
        own = {"address_space_bytes": memory, "memory_bytes": memory, "file_bytes": 64 * MIB, "processes": PROCESSES}
        self.limits = Limits(cpu_s, LIFE_S, LIFE_S, **own)
        self.sandbox, self.timeout_s, self.most = sandbox, timeout_s, most
        self._threads: list[ThreadPoolExecutor] = []
        self._idle: list[ThreadPoolExecutor] = []

    def take(self) -> ThreadPoolExecutor:
        """Return an idle thread; one that has served a session keeps a warm sandbox."""
        if not self._idle:
            self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="python-session"))
            self._idle.append(self._threads[-1])
        return self._idle.pop()

    def give_back(self, thread: ThreadPoolExecutor) -> None:
        """Make a thread available to another session."""
        self._idle.append(thread)

    def close(self) -> None:
        """End the threads and their sandboxes, each after its running call."""
        for thread in self._threads:
            thread.shutdown(wait=False)


class PythonSession:
    """Python interpreter of one trajectory. Its sandbox starts at the first call, and again after a call that ended
    it."""

    def __init__(self, sessions: PythonSessions) -> None:
        self._sessions = sessions
        self._thread: ThreadPoolExecutor | None = None
        self._held = ExitStack()
        self._open: tuple[Box, socket.socket] | None = None

    async def run(self, code: str) -> str:
        """Return the code's output, last value and error, or the reason why the session ended.

        Raises SandboxError if the sandbox fails.
        """
        if self._thread is None:
            self._thread = self._sessions.take()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, without_surrogates(code))

    async def close(self) -> None:
        """Kill the session, including a running call, even if the caller is cancelled."""
        if (thread := self._thread) is None:
            return
        if self._open is not None:
            with suppress(OSError):  # closed by its thread
                self._open[1].shutdown(socket.SHUT_RDWR)  # the running call gets no reply

        def end() -> None:
            try:
                self._end()
            finally:
                self._sessions.give_back(thread)

        await asyncio.shield(asyncio.wrap_future(thread.submit(end)))

    def _run(self, code: str) -> str:
        if self._open is None:
            self._open = self._begun()
        box, link = self._open
        timeout_s, most = self._sessions.timeout_s, self._sessions.most
        deadline = time.monotonic() + timeout_s + LATE_S
        reply = self._ask(link, "call", deadline, on=0, args=[code, timeout_s, most], named={})
        if isinstance(reply, dict):
            if isinstance(text := reply.get("value"), str):
                return without_surrogates(text)
            if "raised" in reply:  # the code has broken the session program
                return without_surrogates(f"Error: {reply.get('message')}"[:most])
        late = time.monotonic() >= deadline
        result = None if late else box.receive(LAST_WORDS_S)
        self._end()
        if box.lost:
            raise SandboxError("the sandbox of a Python session was ended from outside")
        if late:
            return GONE.format(f"the call did not end within {timeout_s:g} s")
        return GONE.format("it has ended itself" if result is None or result.ok else result.reason)

    def _begun(self) -> tuple[Box, socket.socket]:
        """Start a sandbox with the session program. Raises SandboxError."""
        limits = self._sessions.limits
        link, inside = socket.socketpair()
        self._held.callback(link.close)
        with inside:
            box = self._held.enter_context(self._sessions.sandbox.open(limits, inside))
        box.start_answer(PROGRAM, limits, LIFE_S, WATCH_S)
        box.wait()
        if self._ask(link, "names", time.monotonic() + START_S, names=["run"]) is None:
            self._end()
            raise SandboxError("a Python session does not start in the sandbox")
        return box, link

    def _ask(self, link: socket.socket, do: str, deadline: float, **given: Any) -> Any:
        """Return the reply to one request; None without a reply or if it is too large."""
        data = json.dumps({"do": do, **given}).encode()
        try:
            link.settimeout(max(0.001, deadline - time.monotonic()))
            link.sendall(len(data).to_bytes(4, "little") + data)
        except OSError:
            return None
        head = read(link, 4, deadline)
        size = int.from_bytes(head, "little") if head is not None else 0
        if not 0 < size <= HEAD_BYTES + ESCAPED * self._sessions.most:
            return None
        body = read(link, size, deadline)
        try:
            return None if body is None else json.loads(body)
        except (ValueError, RecursionError):
            return None

    def _end(self) -> None:
        self._open = None
        self._held.close()
